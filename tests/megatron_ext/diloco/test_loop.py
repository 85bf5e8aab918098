"""The outer loop on real replicas against plain float64 loops."""

import pytest
import torch

from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.initialize import draw
from megatron_ext.model.logical import logical_shapes
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.diloco.loops import MODEL, SEED, TIED, make, move_masters, movement
from tests.ranks import run


def train(rank, parallel, model, outer, steps):
    """Made-up inner steps with real outer ones: rounds, masters by block, and weights."""
    with join(parallel, 30) as replicas:
        inner = make(parallel, model, OptimizerConfig(lr=0.1))
        loop = OuterLoop(inner, outer, replicas, steps)
        rounds = []
        for step in range(1, steps + 1):
            move_masters(inner, replicas.index, step)
            rounds += loop.step(step, tokens=1)
        masters = [(b, t.clone()) for kind, b, t in inner.tensors() if kind == "master"]
        weights = [
            parameter.detach().clone() for c in inner.stage.chunks for parameter in c.parameters()
        ]
        return replicas.index, replicas.rank, rounds, masters, weights


def reference(model: ModelConfig, outer: OuterConfig, count: int, steps: int):
    """DiLoCo, algorithm 1, in float64 on whole parameters: the anchors after `steps` steps."""
    anchors = {}
    for name, shape in logical_shapes(model).items():
        anchor = draw(name, model, SEED).double()
        buffer = torch.zeros_like(anchor)
        replicas = [anchor.clone() for _ in range(count)]
        for step in range(1, steps + 1):
            for index, own in enumerate(replicas):
                own += movement(name, shape, index, step)
            if step % outer.interval == 0:
                delta = sum(anchor - own for own in replicas) / count
                buffer = outer.momentum * buffer + delta
                anchor = anchor - outer.lr * (delta + outer.momentum * buffer)
                replicas = [anchor.clone() for _ in range(count)]
        anchors[name] = anchor
    return anchors


def check(parallel: ParallelConfig, model: ModelConfig, outer: OuterConfig, steps: int):
    results = run(train, parallel.world_size, parallel, model, outer, steps)
    anchors = reference(model, outer, parallel.replicas, steps)
    for _, _, _, masters, _ in results:
        for block, master in masters:
            expected = anchors[block.name][block.slices]
            error = (master.double() - expected).norm() / expected.norm()
            assert error < 1e-6, block
    return results


@pytest.mark.parametrize(
    ("count", "layout"),
    [(1, {}), (2, {}), (3, {}), (4, {}), (2, {"tp": 2}), (2, {"dp": 2}), (3, {"pp": 2})],
    ids=str,
)
def test_several_rounds_with_momentum_equal_the_float64_loops(count, layout):
    parallel = ParallelConfig(replicas=count, **layout)
    check(parallel, MODEL, OuterConfig(interval=2, lr=0.7, momentum=0.6), steps=6)


def test_outer_lr_1_without_momentum_is_the_mean_of_the_replicas():
    parallel = ParallelConfig(replicas=3)
    check(parallel, MODEL, OuterConfig(interval=3, lr=1.0, momentum=0.0), steps=3)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}, {"pp": 2}], ids=str)
def test_replicas_are_bit_equal_after_every_outer_step(layout):
    parallel = ParallelConfig(replicas=3, **layout)
    outer = OuterConfig(interval=1, lr=0.9, momentum=0.8)
    results = run(train, parallel.world_size, parallel, MODEL, outer, 2)
    first = {rank: weights for index, rank, _, _, weights in results if index == 0}
    for _, rank, _, _, weights in results:
        for left, right in zip(weights, first[rank], strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("count", "layout"),
    [
        (2, {"tp": 2}),
        (2, {"dp": 2}),
        (2, {"pp": 2}),
        (2, {"tp": 2, "dp": 2}),
        (4, {}),
        (3, {"dp": 2}),
    ],
    ids=str,
)
def test_each_parameter_crosses_once_whatever_the_layout(model, count, layout):
    parallel = ParallelConfig(replicas=count, **layout)
    outer = OuterConfig(interval=1, lr=0.7, momentum=0.6)
    results = run(train, parallel.world_size, parallel, model, outer, 1)
    numel = sum(torch.Size(shape).numel() for shape in logical_shapes(model).values())
    of_replicas = {index: rounds[0] for index, _, rounds, _, _ in results}
    total = sum(result.bytes_sent for result in of_replicas.values())
    assert total == count * 2 * (count - 1) * 4 * numel / count
    for result in of_replicas.values():
        assert result.bytes_sent == result.bytes_planned
        assert result.bytes_sent == pytest.approx(2 * (count - 1) / count * 4 * numel, rel=2e-3)


def test_one_replica_sends_nothing_and_has_no_cosine():
    ((_, _, rounds, _, _),) = run(
        train, 1, ParallelConfig(), MODEL, OuterConfig(interval=2, lr=0.7, momentum=0.6), 4
    )
    assert [result.bytes_sent for result in rounds] == [0, 0]
    assert [result.cosine for result in rounds] == [None, None]
    assert [(result.round, result.step) for result in rounds] == [(1, 2), (2, 4)]


def test_the_records_say_how_far_replicas_are_apart():
    parallel, outer = (
        ParallelConfig(replicas=2, tp=2),
        OuterConfig(interval=2, lr=0.7, momentum=0.6),
    )
    results = run(train, 4, parallel, MODEL, outer, 2)
    shapes = logical_shapes(MODEL)
    deltas = [
        torch.cat(
            [
                -sum(movement(name, shape, index, step).flatten() for step in (1, 2))
                for name, shape in shapes.items()
            ]
        ).double()
        for index in range(2)
    ]
    anchor = torch.cat([draw(name, MODEL, SEED).flatten() for name in shapes]).double()
    mean = (deltas[0] + deltas[1]) / 2
    drift = (deltas[0].norm() + deltas[1].norm()) / 2 / anchor.norm()
    for _, _, (result,), _, _ in results:
        assert result.pseudogradient_norm == pytest.approx(mean.norm().item(), rel=1e-4)
        assert result.drift == pytest.approx(drift.item(), rel=1e-4)
        cosine = torch.cosine_similarity(*deltas, dim=0).item()
        assert result.cosine == pytest.approx(cosine, rel=1e-3, abs=1e-4)


def look(rank, parallel, outer):
    with join(parallel, 30) as replicas:
        inner = make(parallel, MODEL, OptimizerConfig(lr=0.1))
        loop = OuterLoop(inner, outer, replicas, steps=5)
        inner.masters += replicas.index + 1
        inner.write_weights()
        own = [p.detach().clone() for chunk in inner.stage.chunks for p in chunk.parameters()]
        with loop.global_weights():
            seen = [p.detach().clone() for chunk in inner.stage.chunks for p in chunk.parameters()]
        after = [p.detach().clone() for chunk in inner.stage.chunks for p in chunk.parameters()]
        loop.fragments[0].since = 1
        with loop.global_weights():
            anchor = [p.detach().clone() for c in inner.stage.chunks for p in c.parameters()]
        back = [p.detach().clone() for chunk in inner.stage.chunks for p in chunk.parameters()]
        return own, seen, after, anchor, back


def test_global_weights_are_the_anchor_and_the_replicas_own_come_back():
    for own, seen, after, anchor, back in run(
        look, 4, ParallelConfig(replicas=2, dp=2), OuterConfig(interval=5, lr=0.7, momentum=0.6)
    ):
        for left, right in zip(own, seen, strict=True):
            assert torch.equal(left, right)  # position 0: the weights are the anchor's, no swap
        for left, right in zip(own, after, strict=True):
            assert torch.equal(left, right)
        for left, right in zip(own, back, strict=True):
            assert torch.equal(left, right)
        for left, right in zip(own, anchor, strict=True):
            assert not torch.equal(left, right)
