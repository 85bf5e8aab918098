"""A replica whose pseudogradient cannot be used is named; the round stops or leaves it out."""

import pytest
import torch

from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.errors import TrainingError
from megatron_ext.model.initialize import draw
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.diloco.loops import MODEL, SEED, make
from tests.ranks import run

ONCE = {"interval": 1, "lr": 0.7, "momentum": 0.6}
INFINITE, FAR = float("inf"), 50.0


def take_one_step(rank, parallel, outer, bad, bad_value):
    """Replica r moves each master by r + 1, the bad ones by `bad_value`: what comes of it."""
    with join(parallel, 30) as replicas:
        inner = make(parallel, MODEL, OptimizerConfig(lr=0.1))
        loop = OuterLoop(inner, outer, replicas, steps=1)
        inner.masters += bad_value if replicas.index in bad else replicas.index + 1
        try:
            rounds, error = loop.step(1, tokens=1), None
        except TrainingError as caught:
            rounds, error = [], str(caught)
        anchors = [(b, t.clone()) for kind, b, t in loop.tensors() if kind == "anchor"]
        return error, rounds, anchors, inner.masters.clone()


def check_anchor(anchors, move: float) -> None:
    for block, anchor in anchors:
        start = draw(block.name, MODEL, SEED)[block.slices]
        torch.testing.assert_close(anchor, start + move, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize(
    ("bad_value", "says"),
    [(INFINITE, "replica 1 is not finite"), (FAR, "times the median")],
    ids=["infinite", "outlier"],
)
def test_by_default_it_is_named_before_anything_has_changed(layout, bad_value, says):
    parallel = ParallelConfig(replicas=3, **layout)
    outer = OuterConfig(**ONCE, outlier_factor=4)
    for error, _, anchors, _ in run(take_one_step, 6, parallel, outer, [1], bad_value):
        assert "outer step 1: the pseudogradient of replica 1 " in error
        assert says in error
        assert "outer.bad_replica=leave_out" in error
        check_anchor(anchors, 0.0)


@pytest.mark.parametrize("bad_value", [INFINITE, FAR], ids=["infinite", "outlier"])
@pytest.mark.parametrize(
    "options", [{}, {"codec": "linear", "bits": 8, "error_feedback": True}], ids=str
)
def test_left_out_it_counts_nothing_and_takes_the_others_weights(bad_value, options):
    parallel = ParallelConfig(replicas=3, tp=2)
    outer = OuterConfig(**ONCE, **options, outlier_factor=4, bad_replica="leave_out")
    results = run(take_one_step, 6, parallel, outer, [1], bad_value)
    for error, (record,), anchors, masters in results:
        assert error is None
        assert record.left_out == [1]
        assert len(record.norms) == len(record.cosine_to_mean) == 2
        # The mean of replicas 0 and 2 has moved by 2; a first Nesterov step is η·(1 + μ).
        check_anchor(anchors, 2 * 0.7 * 1.6)
        assert masters.isfinite().all()
    firsts = [results[rank][3] for rank in (0, 1)]
    for rank in range(2, 6):
        assert torch.equal(results[rank][3], firsts[rank % 2])


def test_with_no_good_replica_left_it_stops_whatever_is_configured():
    parallel, outer = ParallelConfig(replicas=2), OuterConfig(**ONCE, bad_replica="leave_out")
    for error, _, anchors, _ in run(take_one_step, 2, parallel, outer, [0, 1], INFINITE):
        assert "the pseudogradient of replica 0, 1 is not finite" in error
        check_anchor(anchors, 0.0)


def go_to_the_end(rank, parallel, outer, bad_at):
    """Three steps, in one of which replica 1 moves too far: its records, and the masters."""
    with join(parallel, 30) as replicas:
        inner = make(parallel, MODEL, OptimizerConfig(lr=0.1))
        loop = OuterLoop(inner, outer, replicas, steps=3)
        rounds = []
        for step in (1, 2, 3):
            inner.masters += FAR if replicas.index == 1 and step == bad_at else 1
            rounds += loop.step(step, tokens=1, last=step == 3)
        return [record.left_out for record in rounds], inner.masters.clone()


def test_a_replica_left_out_just_before_the_end_keeps_the_others_waiting():
    """What was sent after step 2 is applied in the last one, and then all send once more."""
    parallel = ParallelConfig(replicas=3)
    outer = OuterConfig(
        interval=2, delay=1, mix=0.5, lr=0.7, momentum=0.6,
        outlier_factor=4, bad_replica="leave_out",
    )  # fmt: skip
    (left_out, first), *others = run(go_to_the_end, 3, parallel, outer, 2)
    assert left_out == [[1], []]
    for theirs, masters in others:
        assert theirs == left_out and torch.equal(masters, first)
