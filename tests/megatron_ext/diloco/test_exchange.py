"""What crosses between replicas: sums in order, bytes as planned, a slow link."""

import time

import pytest
import torch

from megatron_ext.blocks import Block
from megatron_ext.diloco import codecs, plan
from megatron_ext.diloco.collective import Collective
from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.diloco.units import units_of
from megatron_ext.diloco.wire import LinkConfig, Wire
from megatron_ext.model.logical import logical_shapes
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.replicas import ParallelConfig, join
from pretrain.config import load
from tests.megatron_ext.diloco.loops import CODECS, MODEL, make
from tests.ranks import run

UNITS = [
    Block(f"layers.{i}.mlp.up", shape, (0, 0), shape)
    for i, shape in enumerate([(40, 24), (7, 5), (64, 16)])
]
NUMEL = sum(torch.Size(unit.size).numel() for unit in UNITS)


def values_of(replica: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(replica))


def reduce(rank, replicas, weights):
    """The FP32 mean in several buckets, and how many there were."""
    with join(ParallelConfig(replicas=replicas), 30) as meeting:
        buckets = plan.plan_buckets(UNITS, [codecs.make("fp32")] * len(UNITS), replicas, shift=0)
        flat = values_of(meeting.index)
        Collective(Wire(meeting.link, LinkConfig()), buckets).reduce(flat, weights)
        return flat, len(buckets)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [3.0, 0.0, 1.0]], ids=str)
def test_many_buckets_give_the_sum_in_the_order_of_replicas(monkeypatch, weights):
    monkeypatch.setattr(plan, "BUCKET_NUMEL", 300)
    scaled = [weight / max(weights) for weight in weights]
    expected = torch.zeros(NUMEL)
    for replica, weight in enumerate(scaled):
        if weight:
            expected.add_(values_of(replica), alpha=weight)
    expected /= sum(scaled)
    for flat, buckets in run(reduce, 3, 3, weights):
        assert buckets > 5
        assert torch.equal(flat, expected)


def send_each(rank, parallel, configs):
    """One outer step with each configuration, from the same place: bytes sent and planned."""
    with join(parallel, 60) as replicas:
        inner = make(parallel, MODEL, OptimizerConfig(lr=0.1))
        found = []
        for outer in configs:
            loop = OuterLoop(inner, outer, replicas, steps=1)
            inner.masters += 0.01 * (1 + replicas.index)
            found += [(r.bytes_sent, r.bytes_planned) for r in loop.step(1, tokens=1, last=True)]
        return found


@pytest.mark.parametrize("count", [2, 4, 8])
def test_bytes_are_those_that_were_planned_with_every_codec(count):
    configs = [
        OuterConfig(interval=1, lr=0.7, momentum=0.6, **codec, exchange=exchange)
        for codec in [{"codec": "fp32"}, *CODECS]
        for exchange in ("reduce_scatter", "gather")
    ]
    for found in run(send_each, count, ParallelConfig(replicas=count), configs):
        assert len(found) == len(configs)
        assert all(sent == planned > 0 for sent, planned in found)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"codec": "linear", "bits": 4}, 0.53),
        ({"codec": "statistical", "bits": 4}, 0.53),
        ({"codec": "statistical", "bits": 2}, 0.28),
        ({"codec": "bf16"}, 2.03),
    ],
    ids=["linear 4", "statistical 4", "statistical 2", "bf16"],
)
def test_no_replica_sends_more_than_its_share_of_a_real_model(options, most, count):
    """Bytes for each value and leg, times (K − 1)/K, of the 416M model, norms uncompressed."""
    shapes = logical_shapes(load("416m").config.model)
    units = [unit for name, shape in shapes.items() for unit in units_of(name, shape)]
    outer = OuterConfig(**options)
    buckets = plan.plan_buckets(units, outer.codecs_of(units), count, shift=0)
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    for replica in range(count):
        sent = plan.planned_bytes(buckets, replica, count, gather=False)
        assert sent <= most * 2 * (count - 1) / count * numel


def held_back(rank, link):
    """Seconds that each of several exchanges is held back; nobody waits for them here."""
    with join(ParallelConfig(replicas=2), 30) as replicas:
        seconds: list[float] = []
        wire = Wire(replicas.link, link)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", seconds.append)
            for _ in range(4):
                wire.exchange(torch.zeros(2, dtype=torch.uint8), [1, 1], [1, 1])()
        return seconds


def test_jitter_differs_from_one_exchange_to_the_next_but_not_between_runs():
    link = LinkConfig(latency_ms=20_000, jitter_ms=30_000)
    one, other = (run(held_back, 2, link) for _ in range(2))
    for mine, again in zip(one, other, strict=True):
        assert mine == pytest.approx(again, abs=1)
        assert max(mine) - min(mine) > 3
        assert all(19 <= seconds <= 50 for seconds in mine)
    assert one[0] != pytest.approx(one[1], abs=1)  # each sender has its own
