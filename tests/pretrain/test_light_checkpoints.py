"""A light checkpoint holds what replicas share, and a run can go on from it by its path."""

import pytest
import torch

from megatron_ext.checkpoint.saved import Saved
from megatron_ext.errors import ConfigError
from pretrain.config import load
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import losses, train

OPTIONS = {
    "parallel__replicas": 2,
    "outer__interval": 2,
    "train__steps": 8,
    "checkpoint__every": 4,
    "checkpoint__light_every": 2,
}


def test_a_run_goes_on_from_the_anchor_where_the_light_one_is_newer(tmp_path):
    blend = write_corpus(tmp_path)
    begun = train(blend, tmp_path / "run", train__stop_at=4, **OPTIONS)
    folder = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest",
        "light-00000002",
        "step-00000004",
    ]
    light, full = Saved(folder / "light-00000002"), Saved(folder / "step-00000004")
    assert light.folders == ["shared/anchor", "shared/outer_momentum"]
    assert light.manifest.total_bytes < 0.4 * full.manifest.total_bytes
    # Lost after step 6: what is left is the complete one of step 4 and the light one of step 6.
    train(blend, tmp_path / "run", train__stop_at=7, **OPTIONS)
    for path in (folder / "step-00000007").iterdir():
        path.rename(tmp_path / path.name)
    (folder / "step-00000007").rmdir()
    resume = folder / "light-00000006"
    options = OPTIONS | {"train__stop_at": 7, "outer__lr": 1e-30}
    resumed = train(blend, tmp_path / "run", resume=resume, **options)
    anchor = torch.cat([tensor.flatten() for _, tensor in Saved(resume).global_weights()])
    for rank in resumed:
        assert torch.equal(rank["anchor"].sort().values, anchor.sort().values)
    assert not torch.equal(begun[0]["anchor"], resumed[0]["anchor"])
    curve = losses(tmp_path / "run")
    assert len(curve) == 7 and curve[6] < curve[3]


def test_a_light_checkpoint_without_an_anchor_is_refused():
    with pytest.raises(ConfigError, match=r"light_every=3 needs outer\.interval"):
        load("demo", ["data.blend=a", "outer.interval=0", "checkpoint.light_every=3"])
