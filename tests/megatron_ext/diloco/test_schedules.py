"""Outer learning rates and momenta that change, and replicas that train on unequal amounts."""

import pytest
import torch

from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.record import Before, summarise
from megatron_ext.errors import ConfigError
from megatron_ext.replicas import ParallelConfig
from tests.megatron_ext.diloco.loops import BASE, STEPS, check

WARMUP = {"warmup_steps": 5}
COSINE = {"shape": "cosine", "warmup_steps": 4, "final_fraction": 0.2}


SCHEDULES = [
    {"lr_schedule": WARMUP, "momentum_schedule": WARMUP},
    {"lr_schedule": COSINE},
    {"lr_schedule": COSINE, "momentum_schedule": {"shape": "cosine"}},
]


def test_schedules_equal_the_float64_loop():
    choices = [
        *(("nesterov", schedules) for schedules in SCHEDULES),
        ("sgd", SCHEDULES[2]),
        ("muon", SCHEDULES[2]),
        ("adamw", {"lr": 0.01} | SCHEDULES[1]),
    ]
    outers = [
        OuterConfig(**BASE | schedules, optimizer=optimizer, fragments=2)
        for optimizer, schedules in choices
    ]
    for (_, _, rounds), *_ in check(ParallelConfig(replicas=2), *outers, tolerance=1e-5):
        assert len({record.lr for record in rounds}) > 1


def test_a_cosine_ends_at_its_final_fraction_in_the_last_round():
    outer = OuterConfig(**BASE, lr_schedule=COSINE)
    (((_, _, rounds), *_),) = check(ParallelConfig(replicas=2), outer)
    assert rounds[-1].step == STEPS
    assert rounds[-1].lr == pytest.approx(0.2 * BASE["lr"])


def unevenly(replica: int, step: int) -> float:
    return [100, 37, 512][replica] + 10 * step * replica


def idly(replica: int, step: int) -> float:
    return 0 if replica == 1 else 64


@pytest.mark.parametrize("tokens", [unevenly, idly])
@pytest.mark.parametrize(
    ("layout", "options"),
    [({"tp": 2}, {}), ({}, {"fragments": 3, "delay": 2, "mix": 0.5})],
    ids=str,
)
def test_a_replica_weighs_as_much_as_it_trained_on(tokens, layout, options):
    outer = OuterConfig(**BASE, **options)
    (results,) = check(ParallelConfig(replicas=3, **layout), outer, tokens=tokens)
    for _, _, rounds in results:
        sent_before = {}
        for record in rounds:
            first = sent_before.get(record.fragment, 0) + 1
            sent_before[record.fragment] = record.sent
            steps = range(first, record.sent + 1)
            assert record.tokens == [
                sum(tokens(index, step) for step in steps) for index in range(3)
            ]


def test_a_plain_mean_needs_no_outer_values_and_takes_none():
    outer = OuterConfig(interval=6, optimizer="mean")
    (((_, _, rounds), *_),) = check(ParallelConfig(replicas=3), outer)
    assert {(record.lr, record.momentum) for record in rounds} == {(1.0, 0.0)}
    for options in ({"lr": 0.7}, {"momentum": 0.5}, {"lr_schedule": WARMUP}):
        with pytest.raises(ConfigError, match=r"outer\.optimizer=mean has neither"):
            OuterConfig(interval=6, optimizer="mean", **options)


def test_adamw_refuses_a_momentum_that_changes():
    with pytest.raises(ConfigError, match=r"outer\.momentum_schedule is not for"):
        OuterConfig(**BASE, optimizer="adamw", momentum_schedule=WARMUP)


def test_the_cosine_of_unequal_replicas_is_the_weighted_one():
    generator = torch.Generator().manual_seed(3)
    deltas = torch.randn(3, 50, generator=generator, dtype=torch.float64) + 0.5
    weights = [1.0, 2.0, 5.0]
    mean = sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)
    before = Before(deltas.norm(dim=1).tolist(), 1.0, weights)
    totals = torch.zeros(3, 7, dtype=torch.float64)
    totals[:, 0] = mean.square().sum()
    above = below = 0.0
    for i in range(3):
        for j in range(3):
            if i != j:
                above += weights[i] * weights[j] * torch.dot(deltas[i], deltas[j])
                below += weights[i] * weights[j] * deltas[i].norm() * deltas[j].norm()
    found = summarise(before, [], totals, own=0).cosine
    assert found == pytest.approx((above / below).item(), rel=1e-9)
