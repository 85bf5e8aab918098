"""Everything that a run needs to go on, for its checkpoints."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_ext.checkpoint.state import StateTensor
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.errors import ConfigError
from megatron_ext.model.fp8.state import DelayedScaling
from megatron_ext.muon.optimizer import InnerOptimizer
from pretrain.config import fields, from_options
from pretrain.doctor import Finding, examine, refuse
from pretrain.order import Position
from pretrain.samples import Samples
from pretrain.schedule import learning_rate


class RunState:
    """One rank's state of a run; fills megatron_ext.checkpoint's TrainingState.

    Attributes:
        step: inner steps taken.
        options: every option by dotted key, as JSON knows it.
        facts: what counts besides the options: fingerprints and routing, by name.
        findings: after a resume, what differs from the checkpoint.
    """

    def __init__(
        self,
        inner: InnerOptimizer,
        outer: OuterLoop | None,
        samples: Samples,
        scaling: DelayedScaling,
        options: dict[str, Any],
        facts: dict[str, Any],
    ):
        self.step = 0
        self.options = options
        self.facts = facts
        self.findings: list[Finding] = []
        self._inner = inner
        self._outer = outer
        self._samples = samples
        self._scaling = scaling

    @property
    def position(self) -> Position:
        """Where the run stands in the order of samples."""
        return self._samples.position(self.step)

    def tensors(self) -> Iterator[StateTensor]:
        """Masters, optimizer state, anchor and outer momentum."""
        yield from self._inner.tensors()
        yield from self._scaling.tensors()
        if self._outer:
            yield from self._outer.tensors()

    def counters(self) -> dict[str, Any]:
        """Positions in the run, its options, and what else decides what it computes."""
        counters = {
            **asdict(self.position),
            "optimizer_steps": self._inner.steps,
            "options": self.options,
            "facts": self.facts,
        }
        if self._outer:
            counters["outer"] = self._outer.counters()
        return counters

    def accept(self, counters: dict[str, Any], path: Path) -> None:
        """Note what differs from the checkpoint; nothing is loaded yet.

        Raises ConfigError for what cannot be honoured.
        """
        if "weights_of" in counters:
            raise ConfigError(
                f"{path} holds weights only, from which no run can go on; begin a new one with "
                f"resume.weights={path}"
            )
        # An option that a checkpoint does not know yet had what is its default now.
        saved = _defaults() | counters["options"] | counters["facts"]
        here = self.options | self.facts
        self.findings = examine(saved, here, self.options["resume.allow"])
        refuse(self.findings, str(path))
        next_step = counters["step"] + 1
        before, now = (_rate(options, next_step) for options in (counters["options"], self.options))
        if before != now:
            name = f"learning rate of step {next_step}"
            self.findings.append(Finding(name, before, now, "follows from the options"))
        self._refuse_skipping_back(counters)

    def rng(self) -> torch.Tensor:
        """States of the CPU's, and of megatron-core's tracked, random generators."""
        return torch.cat(self._generators())

    def restore(self, counters: dict[str, Any], rng: torch.Tensor | None) -> None:
        """Take over what `counters` and `rng` gave; the tensors are loaded already.

        Collective over all processes of all replicas.
        """
        saved = counters["options"] | counters["facts"]
        self.step = counters["step"]
        goes_on = all(saved[name] == value for name, value in self._samples.order.items())
        sample = counters["sample"] if goes_on else 0
        self._samples.start(Position(self.step, sample, counters["tokens"]))
        # A light checkpoint brings no inner optimizer state, and the masters are the anchor.
        self._inner.steps = 0 if counters["light"] else counters["optimizer_steps"]
        if self._outer:
            self._outer.restore(counters["outer"], at_anchor=counters["light"])
        self._scaling.share()
        self._inner.write_weights()
        if rng is not None:
            self._set_generators(rng)

    def _refuse_skipping_back(self, counters: dict[str, Any]) -> None:
        for window in self.options["data.skip"]:
            if window[0] < counters["sample"] and window not in counters["options"]["data.skip"]:
                raise ConfigError(
                    f"data.skip: {window} begins before sample {counters['sample']}, with which "
                    f"step {counters['step'] + 1} begins, so it was trained on already; resume "
                    "from an earlier checkpoint, or leave out what comes later"
                )

    def _generators(self) -> list[torch.Tensor]:
        tracked = get_cuda_rng_tracker().get_states()
        return [torch.get_rng_state(), *(tracked[name].cpu() for name in sorted(tracked))]

    def _set_generators(self, rng: torch.Tensor) -> None:
        # Torch reads a state from where the storage begins, and so a view's from the wrong place.
        parts = [part.clone() for part in rng.split([s.numel() for s in self._generators()])]
        torch.set_rng_state(parts[0])
        tracker = get_cuda_rng_tracker()
        names = sorted(tracker.get_states())
        tracker.set_states(dict(zip(names, parts[1:], strict=True)))


def _rate(options: dict[str, Any], step: int) -> float:
    config = from_options(options)
    return learning_rate(step, config.train.steps, config.optimizer)


def _defaults() -> dict[str, Any]:
    """Every option that has a default, as JSON knows it."""
    return {
        name: json.loads(json.dumps(field.get_default()))
        for name, field in fields().items()
        if not field.is_required()
    }
