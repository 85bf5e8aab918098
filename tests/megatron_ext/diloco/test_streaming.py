"""Fragments, delays, mixing, codecs and error feedback against plain float64 loops."""

import time
from itertools import product

import pytest
import torch

from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.diloco.wire import LinkConfig
from megatron_ext.model.logical import logical_shapes
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.diloco.loops import BASE, CODECS, MODEL, STEPS, check, make, run_each
from tests.ranks import run

LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}]
BOTH_LEGS = {"error_feedback": True, "second_error_feedback": True}
OVERLAPPED = {"fragments": 3, "delay": 2, "mix": 0.5}


def each(**choices) -> list[OuterConfig]:
    """A configuration for each combination of the choices."""
    return [
        OuterConfig(**BASE | dict(zip(choices, values, strict=True)))
        for values in product(*choices.values())
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fragments_delays_and_mixing_on_shards(layout):
    outers = each(fragments=[1, 3], delay=[0, 2], mix=[0.0, 0.5, 1.0])
    check(ParallelConfig(replicas=2, **layout), *outers)


@pytest.mark.parametrize("count", [1, 4])
def test_fragments_delays_and_mixing_with_any_number_of_replicas(count):
    outers = each(fragments=[1, 3], delay=[0, 2], mix=[0.0, 0.5, 1.0], fragment_order=["strided"])
    check(ParallelConfig(replicas=count), *outers)


def test_fragments_whose_layers_lie_on_interleaved_stages():
    deeper = MODEL.model_copy(update={"layers": 4})
    outers = each(fragments=[3], delay=[0, 2], fragment_order=["contiguous", "strided"])
    check(ParallelConfig(replicas=2, pp=2, interleave=2), *outers, model=deeper)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_every_outer_optimizer(layout):
    values = {"sgd": {}, "muon": {}, "adamw": {"lr": 0.01}, "mean": {"lr": 1.0, "momentum": 0.0}}
    outers = [
        OuterConfig(**BASE | own, optimizer=optimizer, fragments=fragments)
        for optimizer, own in values.items()
        for fragments in (1, 3)
    ]
    check(ParallelConfig(replicas=2, **layout), *outers, tolerance=1e-5)


@pytest.mark.parametrize(
    ("count", "layout"),
    [
        (2, LAYOUTS[1]),
        *(pytest.param(2, layout, marks=pytest.mark.slow) for layout in (LAYOUTS[0], *LAYOUTS[2:])),
        pytest.param(4, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_codecs_leave_does_not_depend_on_the_layout(count, layout):
    """But for a few values in the middle between two codes, where the last bit decides.

    The mean of two grids of codes has such values by construction, a few percent of some matrices.
    """
    outers = [
        OuterConfig(**BASE, **codec, **legs, **options)
        for codec in CODECS
        for legs in ({}, {"error_feedback": True}, BOTH_LEGS)
        for options in ({}, OVERLAPPED)
    ]
    check(ParallelConfig(replicas=count, **layout), *outers, tolerance=2e-3, spared=0.06)


def check_same(one: OuterConfig, other: OuterConfig) -> None:
    """Every tensor that the first has is bit-equal in the second."""
    for (_, left, _), (_, right, _) in zip(
        *run_each(ParallelConfig(replicas=2), [one, other]), strict=True
    ):
        others = {(kind, block): tensor for kind, block, tensor in right}
        for kind, block, tensor in left:
            assert torch.equal(tensor, others[kind, block]), (kind, block)


@pytest.mark.parametrize("options", [{}, OVERLAPPED], ids=str)
def test_lossless_packing_with_error_feedback_is_no_packing_at_all(options):
    outer = OuterConfig(**BASE, **options)
    check_same(outer, outer.model_copy(update=BOTH_LEGS))


def test_state_in_host_memory_gives_the_same_bits():
    outer = OuterConfig(**BASE, **CODECS[1], error_feedback=True, fragments=3, delay=2)
    check_same(outer, outer.model_copy(update={"host_memory": True}))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_four_bits_send_an_eighth_whatever_the_number_of_replicas(count):
    """At most 0.53 bytes a value and leg, times (K − 1)/K, with units of a usual size."""
    model = MODEL.model_copy(update={"hidden": 128, "ffn": 256, "vocab_size": 256})
    outer = OuterConfig(interval=STEPS, lr=0.7, momentum=0.6, codec="linear", bits=4)
    (results,) = run_each(ParallelConfig(replicas=count), [outer], model=model)
    shapes = logical_shapes(model).values()
    matrices = sum(torch.Size(shape).numel() for shape in shapes if len(shape) > 1)
    norms = sum(torch.Size(shape).numel() for shape in shapes if len(shape) == 1)
    sent = [record.bytes_sent for _, _, rounds in results for record in rounds]
    planned = [record.bytes_planned for _, _, rounds in results for record in rounds]
    assert sent == planned
    assert len(sent) == count
    # A unit is reduced by one replica, so it is their mean that has the bound.
    assert sum(sent) / count <= 2 * (count - 1) / count * (0.53 * matrices + 4 * norms)


def train_slowly(rank, parallel, outer):
    with join(parallel, 30) as replicas:
        loop = OuterLoop(make(parallel, MODEL, OptimizerConfig(lr=0.1)), outer, replicas, 12)
        rounds = []
        for step in range(1, 12):
            time.sleep(0.5)  # an inner step
            rounds += loop.step(step, tokens=1)
        # Where other processes disturb one round, the other one still tells.
        return min((record.exposed_seconds, record.seconds) for record in rounds)


@pytest.mark.parametrize(
    "slow",
    [
        # Four exchanges one after another: 1.2 s.
        pytest.param(LinkConfig(latency_ms=300), marks=pytest.mark.slow),
        LinkConfig(gbit=0.00048),  # 72 KB of the model: 1.2 s
    ],
    ids=["latency", "bandwidth"],
)
def test_a_delay_that_covers_the_transfer_leaves_a_tenth_of_the_wait_or_less(slow):
    exposed = []
    for delay in (0, 3):
        outer = OuterConfig(interval=4, lr=0.7, momentum=0.6, delay=delay, link=slow)
        (waited, seconds), _ = run(train_slowly, 2, ParallelConfig(replicas=2), outer)
        assert seconds > 1.1
        exposed.append(waited)
    without, covered = exposed
    assert without > 1.1
    assert covered <= without / 10
