"""A run goes on, on another cutting or with other replicas, as if it had always been cut so."""

import json

import pytest
import torch

from pretrain.checkpoint import main
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import losses, train

STEPS, STOP = 8, 5

LAYOUTS = {
    "whole": {},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "dp 2": {"dp": 2},
    "dp 3": {"dp": 3},
    "dp 4": {"dp": 4},
    "tp 2 sp dp 2": {"tp": 2, "sequence_parallel": True, "dp": 2},
    "pp 2 × 2": {"pp": 2, "interleave": 2},
}


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def _options(layout: str, **options) -> dict:
    parallel = {f"parallel__{name}": value for name, value in LAYOUTS[layout].items()}
    sizes = {"train__global_batch": 24, "train__micro_batch": 1, "train__steps": STEPS}
    return parallel | sizes | options


@pytest.fixture(scope="module")
def straight(blend, tmp_path_factory) -> dict[str, list[float]]:
    """Losses of the run that one process did without a stop, by inner optimizer."""
    found = {}
    for name in ("muon", "adamw"):
        folder = tmp_path_factory.mktemp("straight")
        train(blend, folder, **_options("whole", optimizer__name=name))
        found[name] = losses(folder)
    return found


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("tp 2", "whole", "muon"),
        pytest.param("whole", "tp 2", "adamw", marks=pytest.mark.slow),
        ("dp 2", "dp 3", "adamw"),
        pytest.param("dp 4", "dp 2", "muon", marks=pytest.mark.slow),
        ("whole", "pp 2", "muon"),
        ("pp 2 × 2", "tp 2 sp dp 2", "muon"),
    ],
)
def test_the_loss_curve_does_not_show_that_the_layout_changed(
    blend, tmp_path, straight, before, after, name
):
    train(blend, tmp_path, train__stop_at=STOP, **_options(before, optimizer__name=name))
    train(blend, tmp_path, **_options(after, optimizer__name=name))
    tolerance = {"adamw": 1e-4, "muon": 1e-3}[name]
    assert losses(tmp_path) == pytest.approx(straight[name], rel=tolerance)
    worst = max(abs(a / b - 1) for a, b in zip(losses(tmp_path), straight[name], strict=True))
    print(f"{name}, {before} → {after}: largest relative difference of the loss {worst:.1e}")


def _replicas(count: int, **options) -> dict:
    return _options("whole", parallel__replicas=count, outer__interval=STOP, **options)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (4, 2)])
def test_replicas_that_join_or_leave_at_a_rounds_end_hold_the_anchor(
    blend, tmp_path, before, after
):
    ended = train(blend, tmp_path, train__stop_at=STOP, **_replicas(before))
    # One more inner step at a learning rate of nothing shows what the replicas resumed with.
    more = {"train__stop_at": STOP + 1, "optimizer__lr": 1e-30, "optimizer__weight_decay": 0.0}
    resumed = train(blend, tmp_path, **_replicas(after, **more))
    assert len(resumed) == after
    for rank in resumed:
        assert torch.equal(rank["anchor"], ended[0]["anchor"])
        flat = torch.cat([tensor.flatten() for _, tensor in rank["masters"]])
        assert torch.equal(flat, torch.cat([t.flatten() for _, t in ended[0]["masters"]]))


@pytest.mark.parametrize("stop", [STOP, STOP - 2])
def test_a_run_learns_on_after_replicas_have_joined(blend, tmp_path, stop):
    train(blend, tmp_path, train__stop_at=stop, **_replicas(1))
    train(blend, tmp_path, **_replicas(2))
    curve = losses(tmp_path)
    assert len(curve) == STEPS
    assert max(curve[stop:]) < min(curve[: stop - 1])


def test_the_commands_read_a_real_runs_checkpoint(blend, tmp_path, capsys):
    train(blend, tmp_path, **_options("tp 2"))
    assert main(["verify", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["step"] == STEPS
    assert content["layout"]["tp"] == 2
