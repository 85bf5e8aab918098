"""After each outer step anchors are bit-equal in all replicas, and weights where α is 0."""

import hashlib
from itertools import product

import pytest
import torch

from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.diloco.units import fragments_of
from megatron_ext.model.logical import logical_shapes
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.diloco.loops import CODECS, MODEL, make, move_masters
from tests.ranks import run

STEPS = 7
BOTH_LEGS = {"error_feedback": True, "second_error_feedback": True}
PACKINGS = [
    {},
    CODECS[0],
    CODECS[1] | {"error_feedback": True},
    CODECS[4] | BOTH_LEGS,
    CODECS[6] | {"fragment_order": "strided"},
    CODECS[3] | {"exchange": "gather"},
]
GRID = [
    OuterConfig(interval=4, lr=0.7, momentum=0.6, fragments=p, delay=tau, mix=mix, **packing)
    for p, tau, mix, packing in product([1, 3], [0, 2], [0.0, 0.5], PACKINGS)
]


def digests(rank, parallel):
    """For each configuration: of what was applied in each step, anchors and (α = 0) masters."""
    with join(parallel, 60) as replicas:
        inner = make(parallel, MODEL, OptimizerConfig(lr=0.1))
        start = inner.masters.clone()
        return replicas.rank, [trace(inner, start, outer, replicas) for outer in GRID]


def trace(inner, start, outer, replicas):
    inner.masters.copy_(start)
    loop = OuterLoop(inner, outer, replicas, STEPS)
    fragment_of = fragments_of(logical_shapes(MODEL), outer.fragments, outer.fragment_order)
    found = []
    for step in range(1, STEPS + 1):
        move_masters(inner, replicas.index, step)
        last = step == STEPS
        for record in loop.step(step, tokens=1, last=last):
            fragment = loop.fragments[record.fragment]
            found.append((step, record.fragment, "anchor", digest([fragment.anchor])))
            if outer.mix == 0 or last:
                masters = [
                    tensor
                    for kind, block, tensor in inner.tensors()
                    if kind == "master" and fragment_of[block.name] == record.fragment
                ]
                found.append((step, record.fragment, "masters", digest(masters)))
    return found


def digest(tensors: list[torch.Tensor]) -> str:
    content = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("count", "layout"),
    [
        (2, {"tp": 2}),
        *(
            pytest.param(count, layout, marks=pytest.mark.slow)
            for count, layout in [(4, {}), (2, {"pp": 2}), (3, {"dp": 2})]
        ),
    ],
    ids=str,
)
def test_replicas_hold_the_same_bits_after_every_outer_step(count, layout):
    parallel = ParallelConfig(replicas=count, **layout)
    first = {}
    for rank, traces in run(digests, parallel.world_size, parallel, timeout=120):
        assert all(len(found) > 2 for found in traces)
        for outer, found, expected in zip(
            GRID, traces, first.setdefault(rank, traces), strict=True
        ):
            assert found == expected, outer
