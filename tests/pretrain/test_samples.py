"""Which samples a step is trained on."""

import numpy as np
import pytest
import torch
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_ext import host
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.replicas import initialize_megatron, join
from pretrain.config import load
from pretrain.data import BlendFile
from pretrain.samples import Samples
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL
from tests.ranks import run


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), parts=2)


def options(blend, folder, **more) -> list[str]:
    values = SMALL | {"data.blend": blend, "run.dir": folder} | more
    return [f"{key}={value}" for key, value in values.items()]


def read(rank, overrides, steps):
    config = load("demo", overrides).config
    host.prepare()
    with join(config.parallel, 30) as replicas:
        initialize_megatron(config.parallel, 1)
        samples = Samples(config, replicas)
        return [
            torch.cat([batch["tokens"] for batch in samples.micro_batches(step)]) for step in steps
        ]


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel.dp": 2},
        {"parallel.replicas": 2, "outer.interval": 1},
        {"parallel.replicas": 2, "parallel.dp": 2, "outer.interval": 1},
        {"train.micro_batch": 8},
    ],
    ids=str,
)
def test_a_step_is_trained_on_the_same_samples_in_the_same_order(blend, tmp_path, layout):
    (whole,) = run(read, 1, options(blend, tmp_path / "one"), [1, 2, 10])
    ranks = load("demo", options(blend, tmp_path / "many", **layout)).config.parallel.world_size
    parts = run(read, ranks, options(blend, tmp_path / "many", **layout), [1, 2, 10])
    for step, expected in enumerate(whole):
        assert torch.equal(torch.cat([part[step] for part in parts]), expected)


def test_tensor_and_pipeline_ranks_read_the_same(blend, tmp_path):
    layout = {"parallel.tp": 2, "parallel.pp": 2}
    first, *others = run(read, 4, options(blend, tmp_path, **layout), [1])
    for other in others:
        assert torch.equal(first[0], other[0])


def test_replicas_share_one_index_cache_without_racing(blend, tmp_path):
    layout = {"parallel.replicas": 4, "outer.interval": 1}
    run(read, 4, options(blend, tmp_path, **layout), [1])
    (folder,) = (tmp_path / "index-cache").iterdir()
    assert (folder / "complete").is_file()


def test_an_interrupted_index_build_is_done_again(blend, tmp_path):
    (expected,) = run(read, 1, options(blend, tmp_path), [1])
    (folder,) = (tmp_path / "index-cache").iterdir()
    (folder / "complete").unlink()
    for file in folder.glob("*sample_index.npy"):
        file.write_bytes(file.read_bytes()[:100])
    (found,) = run(read, 1, options(blend, tmp_path), [1])
    assert torch.equal(found[0], expected[0])


def test_tokenising_again_to_the_same_place_is_noticed(tmp_path):
    blend = write_corpus(tmp_path)
    (before,) = run(read, 1, options(blend, tmp_path / "run"), [1])
    blend = write_corpus(tmp_path, documents=100)
    (after,) = run(read, 1, options(blend, tmp_path / "run"), [1])
    assert not torch.equal(before[0], after[0])
    assert len(list((tmp_path / "run/index-cache").iterdir())) == 2


def edit(blend, change):
    tree = yaml.safe_load(blend.read_text())
    change(tree)
    blend.write_text(yaml.safe_dump(tree))


def test_a_blend_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.blend=.*nowhere\.yaml is not there; `python -m"):
        run(read, 1, options(tmp_path / "nowhere.yaml", tmp_path), [1])


def test_folder_in_place_of_its_blend_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder; give .*tokens/blend\.yaml"):
        (tmp_path / "tokens").mkdir()
        BlendFile(tmp_path / "tokens")


def test_a_prefix_that_is_not_there_is_named(tmp_path):
    blend = write_corpus(tmp_path)
    edit(blend, lambda tree: tree["train"][0].update(prefix="elsewhere/part7"))
    with pytest.raises(DataError, match=r"elsewhere/part7\.bin is not there, but .*blend\.yaml"):
        run(read, 1, options(blend, tmp_path), [1])


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(tmp_path):
    blend = write_corpus(tmp_path)
    edit(blend, lambda tree: tree["tokenizer"].update(vocab_size=65))
    with pytest.raises(ConfigError, match=r"model\.vocab_size=64 is smaller than .* 65 of"):
        run(read, 1, options(blend, tmp_path), [1])


def test_a_sequence_longer_than_the_data_is_refused(tmp_path):
    blend = write_corpus(tmp_path, documents=3)
    with pytest.raises(ConfigError, match=r"model\.sequence_length=1024 is longer than the \d+"):
        run(read, 1, options(blend, tmp_path, **{"model.sequence_length": 1024}), [1])


def test_validation_without_held_out_text_is_refused(tmp_path):
    blend = write_corpus(tmp_path)
    edit(blend, lambda tree: tree.pop("validation"))
    with pytest.raises(ConfigError, match=r"validation\.every=5, but .* holds out no text"):
        run(read, 1, options(blend, tmp_path, **{"validation.every": 5}), [1])


def test_a_shortened_binary_is_noticed_before_training(tmp_path):
    blend = write_corpus(tmp_path)
    binary = tmp_path / "part0.bin"
    binary.write_bytes(binary.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"part0\.bin has \d+ bytes, which \d+ tokens"):
        run(read, 1, options(blend, tmp_path), [1])


def test_a_blend_is_mixed_by_its_weights(tmp_path):
    """Two parts of disjoint tokens, 3 to 1."""
    for name, token in (("a", 5), ("b", 9)):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        for _ in range(50):
            builder.add_document(np.full(100, token), [100])
        builder.finalize(str(tmp_path / f"{name}.idx"))
    blend = write_corpus(tmp_path)
    parts = [
        {"prefix": name, "weight": weight, "documents": 50, "tokens": 5000}
        for name, weight in (("a", 0.75), ("b", 0.25))
    ]
    edit(blend, lambda tree: tree.update(train=parts))
    (steps,) = run(read, 1, options(blend, tmp_path), range(1, 11))
    share = (torch.cat(steps)[:, 0] == 5).float().mean().item()
    assert share == pytest.approx(0.75, abs=0.02)
