"""Fragments, delays, mixing, codecs and error feedback against plain float64 loops."""

import math
import time

import pytest
import torch

from megatron_ext.diloco import codecs
from megatron_ext.diloco.config import OuterConfig, ScheduleConfig
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.diloco.units import fragments_of, offsets, units_of
from megatron_ext.diloco.wire import LinkConfig
from megatron_ext.model.initialize import draw
from megatron_ext.model.logical import kind_of, logical_shapes
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.newton_schulz import update_scale
from megatron_ext.muon.reference import orthogonalize
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.diloco.test_loop import MODEL, SEED, make, movement
from tests.ranks import run

STEPS, INTERVAL = 14, 6


def tokens_of(replica: int) -> float:
    """What a replica trains on in a step, where it is not the same for all."""
    return 1.0 + 2.0 * replica


def train(rank, parallel, outer, model=MODEL, uneven=False):
    """Made-up inner steps with real outer ones: what each rank holds, and its records."""
    with join(parallel, 30) as replicas:
        inner = make(parallel, model, OptimizerConfig(lr=0.1))
        loop = OuterLoop(inner, outer, replicas, STEPS)
        rounds = []
        for step in range(1, STEPS + 1):
            for kind, block, master in inner.tensors():
                if kind == "master":
                    move = movement(block.name, block.shape, replicas.index, step)
                    master += move[block.slices]
            tokens = tokens_of(replicas.index) if uneven else 1.0
            rounds += loop.step(step, tokens, last=step == STEPS)
        state = [(kind, block, t.clone()) for kind, block, t in inner.tensors() if kind == "master"]
        loop.settle()
        state += [(kind, block, tensor.clone()) for kind, block, tensor in loop.tensors()]
        return replicas.index, state, rounds


class Reference:
    """The loop on whole parameters in float64; codecs are the float32 ones, as what they do to a
    value is tested by itself."""

    def __init__(self, outer: OuterConfig, count: int, model=MODEL, uneven=False):
        shapes = logical_shapes(model)
        self.outer, self.count = outer, count
        weights = [tokens_of(index) if uneven else 1.0 for index in range(count)]
        self.weights = [weight / sum(weights) for weight in weights]
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
            last = step == STEPS
            self.moved = [True] * len(self.moved)
            for fragment, (sent, _) in sorted(self.flying.items(), key=lambda item: item[1][0]):
                if last or step - sent >= self.outer.delay:
                    self._apply(fragment, self.outer.mix, step)
            for fragment, offset in enumerate(self.offsets):
                due = step >= offset and (step - offset) % self.outer.interval == 0
                if self.moved[fragment] if last else due:
                    self.flying[fragment] = (step, self._mean(fragment))
                    if last or self.outer.delay == 0:
                        self._apply(fragment, 0.0 if last else self.outer.mix, step)

    def _mean(self, fragment: int) -> dict[str, torch.Tensor]:
        names = [name for name, of in self.fragment.items() if of == fragment]
        return {name: self._mean_of(name) for name in names}

    def _mean_of(self, name: str) -> torch.Tensor:
        outer, anchor = self.outer, self.anchor[name]
        codec = codecs.make(outer.codec, outer.bits, outer.per_row, outer.keep, outer.chunk)
        if kind_of(name) == "norm" or self.count == 1:
            codec = codecs.make("fp32")
        feedback = outer.error_feedback and self.count > 1
        total = torch.zeros_like(anchor)
        for own, errors, weight in zip(self.masters, self.error, self.weights, strict=True):
            error = errors[name]
            due = anchor - own[name]
            if feedback:
                due = outer.error_decay * error + due
            packed = packed_and_back(name, due, codec)
            if feedback:
                error.copy_(due - packed)
            total += weight * packed
        mean = total
        if self.count == 1:
            return mean
        if outer.second_error_feedback:
            mean = outer.error_decay * self.second_error[name] + mean
        packed = packed_and_back(name, mean, codec)
        if outer.second_error_feedback:
            self.second_error[name].copy_(mean - packed)
        return packed

    def _apply(self, fragment: int, mix: float, step: int) -> None:
        _, means = self.flying.pop(fragment)
        self.rounds[fragment] += 1
        self.moved[fragment] = mix > 0
        for name, delta in means.items():
            self._move(name, delta, self.rounds[fragment], step)
            for own in self.masters:
                own[name] = mix * own[name] + (1 - mix) * self.anchor[name]

    def _move(self, name: str, delta: torch.Tensor, rounds: int, step: int) -> None:
        outer, theta, first = self.outer, self.anchor[name], self.first[name]
        lr = outer.lr * factor(outer.lr_schedule, step)
        mu = outer.momentum * factor(outer.momentum_schedule, step)
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
            theta -= outer.matrix_lr * scale * orthogonalize(first, 5, "quintic")
        else:
            theta -= lr * (delta + mu * first)


def factor(schedule: ScheduleConfig, step: int) -> float:
    """Linear from 0 over the warm-up, then 1, or half a cosine down to the final fraction."""
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.shape == "constant":
        return 1.0
    angle = math.pi * (step - schedule.warmup_steps) / (STEPS - schedule.warmup_steps)
    low = schedule.final_fraction
    return (1 + low) / 2 + (1 - low) / 2 * math.cos(angle)


def packed_and_back(name: str, values: torch.Tensor, codec: codecs.Codec) -> torch.Tensor:
    found = torch.empty_like(values)
    for unit in units_of(name, tuple(values.shape)):
        packed = codec.encode(values[unit.slices].float().contiguous())
        found[unit.slices] = codec.decode(packed).double()
    return found


def check(
    parallel: ParallelConfig,
    outer: OuterConfig,
    tolerance: float = 1e-6,
    model=MODEL,
    uneven=False,
) -> list:
    results = run(train, parallel.world_size, parallel, outer, model, uneven)
    slow = Reference(outer, parallel.replicas, model, uneven)
    slow.run()
    seen: dict[str, list[int]] = {}
    for index, state, _ in results:
        for kind, block, tensor in state:
            seen.setdefault(kind, [0] * parallel.replicas)[index] += tensor.numel()
            expected = {"master": slow.masters[index], "anchor": slow.anchor}.get(kind)
            if expected is None:
                continue
            whole = expected[block.name][block.slices]
            error = (tensor.double() - whole).norm() / whole.norm()
            assert error < tolerance, (kind, block, error)
    # Each rank holds its share, and a replica everything once.
    numel = sum(torch.Size(shape).numel() for shape in logical_shapes(model).values())
    assert {"master", "anchor"} <= seen.keys()
    assert seen == {kind: [numel] * parallel.replicas for kind in seen}
    for _, _, rounds in results:
        for record in rounds:
            assert record.bytes_sent == record.bytes_planned
    return results


BASE = {"interval": INTERVAL, "lr": 0.7, "momentum": 0.6}
LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_three_fragments_with_delay_and_mixing(layout, delay, mix):
    outer = OuterConfig(**BASE, fragments=3, delay=delay, mix=mix)
    check(ParallelConfig(replicas=2, **layout), outer)


@pytest.mark.parametrize("delay", [0, 2])
def test_fragments_whose_layers_lie_on_interleaved_stages(delay):
    deeper = MODEL.model_copy(update={"layers": 4})
    parallel = ParallelConfig(replicas=2, pp=2, interleave=2)
    for order in ("contiguous", "strided"):
        outer = OuterConfig(**BASE, fragments=3, delay=delay, fragment_order=order)
        check(parallel, outer, model=deeper)


def test_replicas_count_by_the_tokens_they_trained_on():
    outer = OuterConfig(**BASE, fragments=2, delay=2, mix=0.5)
    check(ParallelConfig(replicas=3), outer, uneven=True)


@pytest.mark.parametrize(
    "schedule",
    [
        {"warmup_steps": 8},
        {"shape": "cosine", "final_fraction": 0.1},
        {"shape": "cosine", "warmup_steps": 5},
    ],
    ids=str,
)
def test_outer_learning_rate_and_momentum_follow_their_schedules(schedule):
    schedules = {"lr_schedule": schedule, "momentum_schedule": {"warmup_steps": 10}}
    outer = OuterConfig(**BASE, **schedules, fragments=2)
    results = check(ParallelConfig(replicas=2), outer)
    for record in results[0][2]:
        assert record.lr == pytest.approx(0.7 * factor(outer.lr_schedule, record.step))
        assert record.momentum == pytest.approx(0.6 * min(1, record.step / 10))
    assert len({record.lr for record in results[0][2]}) > 2


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("delay", [0, 2])
def test_any_number_of_replicas(count, fragments, delay):
    outer = OuterConfig(**BASE, fragments=fragments, delay=delay, fragment_order="strided")
    check(ParallelConfig(replicas=count), outer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon", "mean"])
def test_every_outer_optimizer(optimizer):
    values = {"adamw": {"lr": 0.01}, "mean": {"lr": None, "momentum": None}}.get(optimizer, {})
    if optimizer == "mean":
        values = {"lr": 1.0, "momentum": 0.0}
    outer = OuterConfig(**(BASE | values), optimizer=optimizer, fragments=2)
    check(ParallelConfig(replicas=2, tp=2), outer, tolerance=1e-5)


CODECS = [
    {"codec": "bf16"},
    {"codec": "linear", "bits": 4},
    {"codec": "linear", "bits": 8, "per_row": True},
    {"codec": "statistical", "bits": 4},
    {"codec": "statistical", "bits": 2, "per_row": True},
    {"codec": "topk", "keep": 0.25},
    {"codec": "topk", "keep": 0.25, "chunk": 64},
]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("feedback", [False, True])
def test_what_codecs_leave_does_not_depend_on_the_layout(codec, feedback, layout):
    """FP32 sums may round a code to its neighbour, so a whole is compared, not each value."""
    outer = OuterConfig(**BASE, **codec, error_feedback=feedback, second_error_feedback=feedback)
    check(ParallelConfig(replicas=2, **layout), outer, tolerance=2e-3)


def check_same(parallel: ParallelConfig, one: OuterConfig, other: OuterConfig) -> None:
    """Every tensor that the first has is bit-equal in the second."""
    results = (run(train, parallel.world_size, parallel, outer) for outer in (one, other))
    for (_, left, _), (_, right, _) in zip(*results, strict=True):
        others = {(kind, block): tensor for kind, block, tensor in right}
        for kind, block, tensor in left:
            assert torch.equal(tensor, others[kind, block]), (kind, block)


@pytest.mark.parametrize("options", [{}, {"fragments": 3, "delay": 2, "mix": 0.5}], ids=str)
def test_lossless_packing_with_error_feedback_is_no_packing_at_all(options):
    feedback = {"error_feedback": True, "second_error_feedback": True}
    outer = OuterConfig(**BASE, **options)
    check_same(ParallelConfig(replicas=2), outer, outer.model_copy(update=feedback))


def test_state_in_host_memory_gives_the_same_bits():
    outer = OuterConfig(**BASE, **CODECS[1], error_feedback=True, fragments=3, delay=2)
    check_same(ParallelConfig(replicas=2), outer, outer.model_copy(update={"host_memory": True}))


@pytest.mark.parametrize(
    "options", [{}, CODECS[1] | {"error_feedback": True}, {"mix": 0.5}], ids=str
)
def test_anchors_of_all_replicas_are_bit_equal(options):
    outer = OuterConfig(**BASE, **options, fragments=3, delay=2)
    results = run(train, 6, ParallelConfig(replicas=3, tp=2), outer)
    first = {}
    for _, state, _ in results:
        for kind, block, tensor in state:
            if kind == "anchor":
                assert torch.equal(tensor, first.setdefault(block, tensor)), block


@pytest.mark.parametrize("order", ["contiguous", "strided"])
@pytest.mark.parametrize(
    "codec", [{}, {"codec": "bf16"}, CODECS[1] | {"error_feedback": True}, CODECS[5]], ids=str
)
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_replicas_are_bit_equal_at_the_end_of_a_run(order, codec, layout):
    """A run's last step applies everything without mixing."""
    outer = OuterConfig(**BASE, **codec, fragments=2, fragment_order=order, delay=1, mix=0.5)
    parallel = ParallelConfig(replicas=2, **layout)
    first = {}
    for _, state, _ in run(train, parallel.world_size, parallel, outer):
        for kind, block, tensor in state:
            if kind in ("master", "anchor"):
                assert torch.equal(tensor, first.setdefault((kind, block), tensor)), block


@pytest.mark.parametrize("count", [2, 4, 8])
def test_four_bits_send_an_eighth_whatever_the_number_of_replicas(count):
    """At most 0.53 bytes a value and leg, times (K − 1)/K, with units of a usual size."""
    model = MODEL.model_copy(update={"hidden": 128, "ffn": 256, "vocab_size": 256})
    outer = OuterConfig(interval=STEPS, lr=0.7, momentum=0.6, codec="linear", bits=4)
    results = run(train, count, ParallelConfig(replicas=count), outer, model)
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
        loop = OuterLoop(make(parallel, MODEL, OptimizerConfig(lr=0.1)), outer, replicas)
        rounds = []
        for step in range(1, 9):
            time.sleep(0.5)  # an inner step
            rounds += loop.step(step)
        return [(record.seconds, record.exposed_seconds) for record in rounds]


@pytest.mark.parametrize(
    "slow",
    [
        LinkConfig(latency_ms=150),  # four exchanges one after another: 0.6 s
        LinkConfig(gbit=0.00048),  # 36 KB of the model's 72: 0.6 s
    ],
    ids=["latency", "bandwidth"],
)
def test_a_delay_hides_a_slow_link_behind_inner_steps_and_without_one_it_shows(slow):
    shares = []
    for delay in (0, 3):
        outer = OuterConfig(interval=4, lr=0.7, momentum=0.6, delay=delay, link=slow)
        results = run(train_slowly, 2, ParallelConfig(replicas=2), outer)
        seconds, exposed = results[0][0]
        assert seconds >= 0.6
        shares.append(exposed / seconds)
    assert shares[0] > 0.9
    assert shares[1] < 0.3
