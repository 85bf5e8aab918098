"""Fragments, delays, mixing, codecs and error feedback against plain float64 loops."""

import time

import pytest
import torch

from megatron_ext.diloco import codecs
from megatron_ext.diloco.config import OuterConfig
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


def train(rank, parallel, outer):
    """Made-up inner steps with real outer ones: what each rank holds, and its records."""
    with join(parallel, 30) as replicas:
        inner = make(parallel, MODEL, OptimizerConfig(lr=0.1))
        loop = OuterLoop(inner, outer, replicas, STEPS)
        rounds = []
        for step in range(1, STEPS + 1):
            for kind, block, master in inner.tensors():
                if kind == "master":
                    move = movement(block.name, block.shape, replicas.index, step)
                    master += move[block.slices]
            rounds += loop.step(step, last=step == STEPS)
        state = [(kind, block, t.clone()) for kind, block, t in inner.tensors() if kind == "master"]
        loop.settle()
        state += [(kind, block, tensor.clone()) for kind, block, tensor in loop.tensors()]
        return replicas.index, state, rounds


class Reference:
    """The loop on whole parameters in float64; codecs are the float32 ones, as what they do to a
    value is tested by itself."""

    def __init__(self, outer: OuterConfig, count: int):
        shapes = logical_shapes(MODEL)
        self.outer, self.count = outer, count
        self.fragment = fragments_of(shapes, outer.fragments, outer.fragment_order)
        self.offsets = offsets(outer.interval, outer.fragments)
        self.anchor = {n: draw(n, MODEL, SEED).double() for n in shapes}
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
                    self._apply(fragment, self.outer.mix)
            for fragment, offset in enumerate(self.offsets):
                due = step >= offset and (step - offset) % self.outer.interval == 0
                if self.moved[fragment] if last else due:
                    self.flying[fragment] = (step, self._mean(fragment))
                    if last or self.outer.delay == 0:
                        self._apply(fragment, 0.0 if last else self.outer.mix)

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
        for own, errors in zip(self.masters, self.error, strict=True):
            error = errors[name]
            due = anchor - own[name]
            if feedback:
                due = outer.error_decay * error + due
            packed = packed_and_back(name, due, codec)
            if feedback:
                error.copy_(due - packed)
            total += packed
        mean = total / self.count
        if self.count == 1:
            return mean
        if outer.second_error_feedback:
            mean = outer.error_decay * self.second_error[name] + mean
        packed = packed_and_back(name, mean, codec)
        if outer.second_error_feedback:
            self.second_error[name].copy_(mean - packed)
        return packed

    def _apply(self, fragment: int, mix: float) -> None:
        _, means = self.flying.pop(fragment)
        self.rounds[fragment] += 1
        self.moved[fragment] = mix > 0
        for name, delta in means.items():
            self._move(name, delta, self.rounds[fragment])
            for own in self.masters:
                own[name] = mix * own[name] + (1 - mix) * self.anchor[name]

    def _move(self, name: str, delta: torch.Tensor, rounds: int) -> None:
        outer, theta, first = self.outer, self.anchor[name], self.first[name]
        lr, mu = outer.lr, outer.momentum
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


def packed_and_back(name: str, values: torch.Tensor, codec: codecs.Codec) -> torch.Tensor:
    found = torch.empty_like(values)
    for unit in units_of(name, tuple(values.shape)):
        packed = codec.encode(values[unit.slices].float().contiguous())
        found[unit.slices] = codec.decode(packed).double()
    return found


def check(parallel: ParallelConfig, outer: OuterConfig, tolerance: float = 1e-6) -> list:
    results = run(train, parallel.world_size, parallel, outer)
    slow = Reference(outer, parallel.replicas)
    slow.run()
    seen: dict[tuple[str, int], int] = {}
    for index, state, _ in results:
        for kind, block, tensor in state:
            expected = {"master": slow.masters[index], "anchor": slow.anchor}.get(kind)
            if expected is None:
                continue
            whole = expected[block.name][block.slices]
            error = (tensor.double() - whole).norm() / whole.norm()
            assert error < tolerance, (kind, block, error)
            seen[kind, index] = seen.get((kind, index), 0) + tensor.numel()
    numel = sum(torch.Size(shape).numel() for shape in logical_shapes(MODEL).values())
    for kind in ("master", "anchor"):
        assert [seen[kind, index] for index in range(parallel.replicas)] == [
            numel
        ] * parallel.replicas
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


def test_lossless_packing_with_error_feedback_is_no_packing_at_all():
    plain, fed = (
        run(train, 2, ParallelConfig(replicas=2), OuterConfig(**BASE, error_feedback=feedback))
        for feedback in (False, True)
    )
    for (_, left, _), (_, right, _) in zip(plain, fed, strict=True):
        others = {(kind, block): tensor for kind, block, tensor in right}
        for kind, block, tensor in left:
            assert torch.equal(tensor, others[kind, block]), (kind, block)


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


@pytest.mark.parametrize("count", [2, 4])
def test_four_bits_send_an_eighth_whatever_the_number_of_replicas(count):
    outer = OuterConfig(**BASE, codec="linear", bits=4, compress_norms=True)
    results = run(train, count, ParallelConfig(replicas=count), outer)
    numel = sum(torch.Size(shape).numel() for shape in logical_shapes(MODEL).values())
    for _, _, rounds in results:
        for record in rounds:
            bound = 2 * (count - 1) / count * numel / 2
            units = len(logical_shapes(MODEL))
            assert record.bytes_sent <= bound + 2 * (count - 1) * units * 64


def train_slowly(rank, parallel, outer):
    with join(parallel, 30) as replicas:
        loop = OuterLoop(make(parallel, MODEL, OptimizerConfig(lr=0.1)), outer, replicas)
        rounds = []
        for step in range(1, 9):
            time.sleep(0.5)  # an inner step
            rounds += loop.step(step)
        return [(record.seconds, record.exposed_seconds) for record in rounds]


def test_a_delay_hides_a_slow_link_behind_inner_steps_and_without_one_it_shows():
    slow = LinkConfig(latency_ms=150)  # four exchanges one after another: 0.6 s
    shares = []
    for delay in (0, 3):
        outer = OuterConfig(interval=4, lr=0.7, momentum=0.6, delay=delay, link=slow)
        results = run(train_slowly, 2, ParallelConfig(replicas=2), outer)
        seconds, exposed = results[0][0]
        assert seconds >= 0.6
        shares.append(exposed / seconds)
    assert shares[0] > 0.9
    assert shares[1] < 0.3
