"""Real replicas with made-up inner steps, and the same loops by hand on whole float64 tensors."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch

from megatron_ext import host
from megatron_ext.diloco import codecs
from megatron_ext.diloco.config import OuterConfig, ScheduleConfig
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.diloco.units import fragments_of, offsets, units_of
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.gpt import build
from megatron_ext.model.initialize import draw
from megatron_ext.model.logical import describe, kind_of, logical_shapes
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.newton_schulz import update_scale
from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.muon.reference import orthogonalize
from megatron_ext.muon.routing import route_all
from megatron_ext.muon.stage import Stage
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.ranks import run

MODEL = ModelConfig(layers=2, hidden=32, heads=4, ffn=48, vocab_size=24, sequence_length=16)
TIED = MODEL.model_copy(update={"tie_head": True})
SEED = 5


def make(parallel: ParallelConfig, model: ModelConfig, config: OptimizerConfig) -> InnerOptimizer:
    host.prepare()
    initialize_megatron(parallel, SEED)
    chunks = build(model, parallel, precision="fp32", recompute="none", seed=SEED)
    logical = describe(chunks, model, parallel)
    stage = Stage(chunks, logical, route_all(model, config), chunks[0].config)
    whole = cache(lambda name: draw(name, model, SEED))
    return InnerOptimizer(stage, config, lambda block: whole(block.name)[block.slices])


def movement(name: str, shape: tuple[int, ...], replica: int, step: int) -> torch.Tensor:
    """What a replica's inner step does to a parameter; any other inner optimizer would do."""
    seed = sum(map(ord, name)) * 1000 + replica * 100 + step
    return 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


STEPS, INTERVAL = 14, 6
BASE = {"interval": INTERVAL, "lr": 0.7, "momentum": 0.6}

CODECS = [
    {"codec": "bf16"},
    {"codec": "linear", "bits": 4},
    {"codec": "linear", "bits": 8, "per_row": True},
    {"codec": "statistical", "bits": 4},
    {"codec": "statistical", "bits": 2, "per_row": True},
    {"codec": "topk", "keep": 0.25},
    {"codec": "topk", "keep": 0.25, "chunk": 64},
]

Tokens = Callable[[int, int], float]  # of a replica in a step


def evenly(replica: int, step: int) -> float:
    """Every replica trains on as many tokens."""
    return 100.0


def train(rank, parallel, outers, tokens=evenly, model=MODEL):
    """Made-up inner steps with real outer ones, from the same start with each configuration.

    For each: (replica, what this rank holds at the end, its records).
    """
    with join(parallel, 60) as replicas:
        inner = make(parallel, model, OptimizerConfig(lr=0.1))
        start = inner.masters.clone()
        return [_train(replicas, inner, start, outer, tokens) for outer in outers]


def _train(replicas, inner, start, outer, tokens):
    inner.masters.copy_(start)
    loop = OuterLoop(inner, outer, replicas, STEPS)
    rounds = []
    for step in range(1, STEPS + 1):
        move_masters(inner, replicas.index, step)
        rounds += loop.step(step, tokens(replicas.index, step), last=step == STEPS)
    state = [(kind, block, t.clone()) for kind, block, t in inner.tensors() if kind == "master"]
    loop.settle()
    state += [(kind, block, tensor.clone()) for kind, block, tensor in loop.tensors()]
    return replicas.index, state, rounds


def move_masters(inner: InnerOptimizer, replica: int, step: int) -> None:
    """Stand in for an inner step."""
    for kind, block, master in inner.tensors():
        if kind == "master":
            master += movement(block.name, block.shape, replica, step)[block.slices]


class Reference:
    """The loop on whole parameters in float64; codecs are the float32 ones, as what they do to a
    value is tested by itself."""

    def __init__(
        self,
        outer: OuterConfig,
        count: int,
        tokens: Tokens = evenly,
        model: ModelConfig = MODEL,
    ):
        shapes = logical_shapes(model)
        self.outer, self.count = outer, count
        self.tokens = tokens
        self.trained = [[0.0] * count for _ in range(outer.fragments)]
        self.fragment = fragments_of(shapes, outer.fragments, outer.fragment_order)
        self.offsets = offsets(outer.interval, outer.fragments)
        self.anchor = {n: draw(n, model, SEED).double() for n in shapes}
        self.masters = [{n: a.clone() for n, a in self.anchor.items()} for _ in range(count)]
        self.first = {n: torch.zeros_like(a) for n, a in self.anchor.items()}
        self.square = {n: torch.zeros_like(a) for n, a in self.anchor.items()}
        self.error = [
            {n: torch.zeros_like(a) for n, a in self.anchor.items()} for _ in range(count)
        ]
        self.second_error = {n: torch.zeros_like(a) for n, a in self.anchor.items()}
        self.flying: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}
        self.rounds = [0] * outer.fragments
        self.moved = [False] * outer.fragments  # whether masters have left the anchor

    def run(self) -> None:
        for step in range(1, STEPS + 1):
            for index, own in enumerate(self.masters):
                for name, value in own.items():
                    value += movement(name, value.shape, index, step)
            for trained in self.trained:
                for index in range(self.count):
                    trained[index] += self.tokens(index, step)
            last = step == STEPS
            self.moved = [True] * len(self.moved)
            for fragment, (sent, _) in sorted(self.flying.items(), key=lambda item: item[1][0]):
                if last or step - sent >= self.outer.delay:
                    self._apply(fragment, step, self.outer.mix)
            for fragment, offset in enumerate(self.offsets):
                due = step >= offset and (step - offset) % self.outer.interval == 0
                if self.moved[fragment] if last else due:
                    self.flying[fragment] = (step, self._mean(fragment))
                    if last or self.outer.delay == 0:
                        self._apply(fragment, step, 0.0 if last else self.outer.mix)

    def _mean(self, fragment: int) -> dict[str, torch.Tensor]:
        names = [name for name, of in self.fragment.items() if of == fragment]
        trained, self.trained[fragment] = self.trained[fragment], [0.0] * self.count
        return {name: self._mean_of(name, trained) for name in names}

    def _mean_of(self, name: str, weights: list[float]) -> torch.Tensor:
        outer, anchor = self.outer, self.anchor[name]
        codec = codecs.make(outer.codec, outer.bits, outer.per_row, outer.keep, outer.chunk)
        if kind_of(name) == "norm" or self.count == 1:
            codec = codecs.make("fp32")
        feedback = outer.error_feedback and self.count > 1
        total = torch.zeros_like(anchor)
        for own, errors, weight in zip(self.masters, self.error, weights, strict=True):
            error = errors[name]
            due = anchor - own[name]
            if feedback:
                due = outer.error_decay * error + due
            packed = packed_and_back(name, due, codec)
            if feedback:
                error.copy_(due - packed)
            total += weight * packed
        mean = total / sum(weights)
        if self.count == 1:
            return mean
        if outer.second_error_feedback:
            mean = outer.error_decay * self.second_error[name] + mean
        packed = packed_and_back(name, mean, codec)
        if outer.second_error_feedback:
            self.second_error[name].copy_(mean - packed)
        return packed

    def _apply(self, fragment: int, step: int, mix: float) -> None:
        _, means = self.flying.pop(fragment)
        self.rounds[fragment] += 1
        self.moved[fragment] = mix > 0
        for name, delta in means.items():
            self._move(name, delta, self.rounds[fragment], step)
            for own in self.masters:
                own[name] = mix * own[name] + (1 - mix) * self.anchor[name]

    def _move(self, name: str, delta: torch.Tensor, rounds: int, step: int) -> None:
        outer, theta, first = self.outer, self.anchor[name], self.first[name]
        factor = factor_at(outer.lr_schedule, step)
        lr, mu = outer.lr * factor, outer.momentum * factor_at(outer.momentum_schedule, step)
        if outer.optimizer == "mean":
            theta -= delta
            return
        if outer.optimizer == "adamw":
            first.copy_(mu * first + (1 - mu) * delta)
            square = self.square[name]
            square.copy_(outer.adam_beta2 * square + (1 - outer.adam_beta2) * delta**2)
            scale = (square / (1 - outer.adam_beta2**rounds)).sqrt() + outer.adam_epsilon
            theta -= lr * first / (1 - mu**rounds) / scale
            return
        first.copy_(mu * first + delta)
        if outer.optimizer == "sgd":
            theta -= lr * first
        elif outer.optimizer == "muon" and kind_of(name) == "matrix":
            scale = update_scale(tuple(theta.shape), "unit_rms_norm")
            theta -= factor * outer.matrix_lr * scale * orthogonalize(first, 5, "quintic")
        else:
            theta -= lr * (delta + mu * first)


def factor_at(schedule: ScheduleConfig, step: int) -> float:
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.shape == "constant":
        return 1.0
    phase = math.pi * (step - schedule.warmup_steps) / (STEPS - schedule.warmup_steps)
    end = schedule.final_fraction
    return end + (1 - end) * (0.5 + 0.5 * math.cos(phase))


def packed_and_back(name: str, values: torch.Tensor, codec: codecs.Codec) -> torch.Tensor:
    found = torch.empty_like(values)
    for unit in units_of(name, tuple(values.shape)):
        packed = codec.encode(values[unit.slices].float().contiguous())
        found[unit.slices] = codec.decode(packed).double()
    return found


@cache
def by_hand(outer: OuterConfig, count: int, tokens: Tokens, model: ModelConfig) -> Reference:
    """The loop's end; the same for all layouts."""
    reference = Reference(outer, count, tokens, model)
    reference.run()
    return reference


def run_each(
    parallel: ParallelConfig,
    outers: Sequence[OuterConfig],
    tokens: Tokens = evenly,
    model: ModelConfig = MODEL,
) -> list[list]:
    """For each configuration the results of all ranks, which are started once."""
    ranks = run(train, parallel.world_size, parallel, outers, tokens, model, timeout=120)
    return [list(results) for results in zip(*ranks, strict=True)]


def check(
    parallel: ParallelConfig,
    *outers: OuterConfig,
    tolerance: float = 1e-6,
    spared: float = 0.0,
    tokens: Tokens = evenly,
    model: ModelConfig = MODEL,
) -> list[list]:
    """Compare all ranks' masters and anchors with the loops by hand; what `run_each` gives.

    `spared`: share of each tensor's values, the worst ones, that need not be within `tolerance`.
    """
    found = run_each(parallel, outers, tokens, model)
    for outer, results in zip(outers, found, strict=True):
        slow = by_hand(outer, parallel.replicas, tokens, model)
        _compare(outer, results, slow, tolerance, spared)
    return found


def _compare(
    outer: OuterConfig, results: list, slow: Reference, tolerance: float, spared: float
) -> None:
    seen: dict[str, list[int]] = {}
    for index, state, rounds in results:
        for kind, block, tensor in state:
            seen.setdefault(kind, [0] * slow.count)[index] += tensor.numel()
            expected = {"master": slow.masters[index], "anchor": slow.anchor}.get(kind)
            if expected is None:
                continue
            whole = expected[block.name][block.slices]
            off = (tensor.double() - whole).abs().flatten().sort().values
            error = off[: len(off) - int(spared * len(off))].norm() / whole.norm()
            assert error < tolerance, (outer, kind, block, error)
        for record in rounds:
            assert record.bytes_sent == record.bytes_planned
    # Each rank holds its share, and a replica everything once.
    numel = sum(anchor.numel() for anchor in slow.anchor.values())
    assert {"master", "anchor"} <= seen.keys()
    assert seen == {kind: [numel] * slow.count for kind in seen}
