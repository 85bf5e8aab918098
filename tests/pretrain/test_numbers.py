"""A whole MuLoCo run by hand: float64, whole tensors, one process; and what the run reported."""

from pathlib import Path

import pytest
import torch

from megatron_ext import host
from megatron_ext.model.initialize import draw
from megatron_ext.model.logical import logical_shapes
from megatron_ext.model.reference import token_losses
from megatron_ext.muon.reference import Reference
from megatron_ext.muon.routing import route_all
from megatron_ext.replicas import initialize_megatron, join
from pretrain.config import load
from pretrain.samples import Samples
from pretrain.settings import RunConfig
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, lines, train
from tests.ranks import run

STEPS, INTERVAL, REPLICAS, HELD_OUT = 4, 2, 2, 2
OPTIONS = {
    "train.steps": STEPS,
    "train.seed": 99,
    "outer.interval": INTERVAL,
    "outer.lr": 0.7,
    "outer.momentum": 0.6,
    "optimizer.arithmetic": "fp32",
    "optimizer.weight_decay": 0.1,
    "optimizer.warmup_steps": 2,
    "validation.every": 2,
    "validation.batches": HELD_OUT,
}

Tokens = list[tuple[torch.Tensor, torch.Tensor]]
Weights = dict[str, torch.Tensor]


def read(rank: int, overrides: list[str]) -> tuple[Tokens, Tokens]:
    """Tokens and labels [global_batch, sequence] of each step, and of each held-out batch."""
    config = load("demo", overrides).config
    host.prepare()
    with join(config.parallel, 30) as replicas:
        initialize_megatron(config.parallel, 1)
        samples = Samples(config, replicas)

        def whole(step: int, split: str) -> tuple[torch.Tensor, torch.Tensor]:
            batches = list(samples.micro_batches(step, split))
            return tuple(torch.cat([b[name] for b in batches]) for name in ("tokens", "labels"))

        steps = [whole(step, "train") for step in range(1, STEPS + 1)]
        return steps, [whole(batch, "validation") for batch in range(1, HELD_OUT + 1)]


def loss_of(weights: Weights, config: RunConfig, data: Tokens) -> torch.Tensor:
    return torch.cat(
        [token_losses(weights, config.model, *batch).flatten() for batch in data]
    ).mean()


class ByHand:
    """The run's algebra: each replica's own optimizer, the mean of them, Nesterov."""

    def __init__(self, config: RunConfig):
        shapes = logical_shapes(config.model)
        self.config = config
        self.anchor = {n: draw(n, config.model, config.train.seed).double() for n in shapes}
        self.buffer = {name: torch.zeros_like(weight) for name, weight in self.anchor.items()}
        routes = route_all(config.model, config.optimizer)
        self.replicas = [Reference(self.anchor, routes, config.optimizer) for _ in range(REPLICAS)]

    def inner_step(self, lr: float, tokens: torch.Tensor, labels: torch.Tensor):
        """Loss and gradient norm of each replica on its slice of the batch."""
        slices = zip(tokens.chunk(REPLICAS), labels.chunk(REPLICAS), strict=True)
        found = []
        for replica, part in zip(self.replicas, slices, strict=True):
            weights = {n: w.clone().requires_grad_() for n, w in replica.weights.items()}
            loss = loss_of(weights, self.config, [part])
            gradients = torch.autograd.grad(loss, list(weights.values()))
            norm = replica.step(dict(zip(weights, gradients, strict=True)), lr)
            found.append((loss.item(), norm))
        return found

    def outer_step(self) -> None:
        outer = self.config.outer
        for name, anchor in self.anchor.items():
            delta = sum(anchor - replica.weights[name] for replica in self.replicas) / REPLICAS
            self.buffer[name] = outer.momentum * self.buffer[name] + delta
            anchor -= outer.lr * (delta + outer.momentum * self.buffer[name])
            for replica in self.replicas:
                replica.weights[name] = anchor.clone()


def data_of(tmp_path, options: dict) -> tuple[RunConfig, Path, Tokens, Tokens]:
    """A run's configuration, its blend, and what it trains on and is judged by."""
    blend = write_corpus(tmp_path, held_out=80)
    values = SMALL | {"data.blend": blend, "run.dir": tmp_path / "read"} | options
    overrides = [f"{key}={value}" for key, value in values.items()]
    ((steps, held_out),) = run(read, 1, overrides)
    return load("demo", overrides).config, blend, steps, held_out


def test_primal_averaging_trains_at_one_point_and_is_judged_at_another(tmp_path):
    """GPA by hand: z is stepped with the gradient at y, and x, which follows z, is judged."""
    own = {"outer.interval": 0, "optimizer.averaging.decay": 0.5, "optimizer.averaging.mix": 0.7}
    options = OPTIONS | own
    config, blend, steps, held_out = data_of(tmp_path, options)
    train(
        blend,
        tmp_path / "run",
        parallel__tp=2,
        **{key.replace(".", "__"): value for key, value in options.items()},
    )
    metrics, validation = (lines(tmp_path / "run", name) for name in ("metrics", "validation"))

    weights = {
        name: draw(name, config.model, config.train.seed).double()
        for name in logical_shapes(config.model)
    }
    stepped = Reference(weights, route_all(config.model, config.optimizer), config.optimizer)
    average = {name: weight.clone() for name, weight in weights.items()}
    for line, batch in zip(metrics, steps, strict=True):
        between = {n: 0.7 * average[n] + 0.3 * stepped.weights[n] for n in average}
        between = {name: weight.requires_grad_() for name, weight in between.items()}
        loss = loss_of(between, config, [batch])
        gradients = torch.autograd.grad(loss, list(between.values()))
        stepped.step(dict(zip(between, gradients, strict=True)), line["lr"])
        average = {n: (average[n] + stepped.weights[n]) / 2 for n in average}
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)
        if line["step"] % 2 == 0:
            expected = loss_of(average, config, held_out).item()
            assert validation[line["step"] // 2]["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_muloco_run_reports_what_it_gives_by_hand(tmp_path):
    config, blend, steps, held_out = data_of(tmp_path, OPTIONS)
    options = {key.replace(".", "__"): value for key, value in OPTIONS.items()}
    train(blend, tmp_path / "run", parallel__replicas=REPLICAS, parallel__tp=2, **options)
    metrics = lines(tmp_path / "run", "metrics")
    validation = lines(tmp_path / "run", "validation")
    lr = config.optimizer.lr
    rates = [lr / 2, lr, lr * (0.1 + 0.9 / 2), lr * 0.1]  # two of warm-up, then half a cosine

    hand = ByHand(config)
    assert validation[0]["loss"] == pytest.approx(
        loss_of(hand.anchor, config, held_out).item(), rel=1e-5
    )
    for step, (line, rate, batch) in enumerate(zip(metrics, rates, steps, strict=True), start=1):
        loss, norm = hand.inner_step(rate, *batch)[0]  # the run reports its first replica's
        assert line["lr"] == pytest.approx(rate)
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert line["tokens_per_second"] == pytest.approx(512 / line["seconds"])
        if step % INTERVAL == 0:
            hand.outer_step()
            measured = validation[step // INTERVAL]
            expected = loss_of(hand.anchor, config, held_out).item()
            assert measured["step"] == step
            assert measured["loss"] == pytest.approx(expected, rel=1e-4)
