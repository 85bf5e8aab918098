"""Everything that a run needs to go on, for its checkpoints."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_ext.checkpoint.state import StateTensor
from megatron_ext.diloco.loop import OuterLoop
from megatron_ext.errors import ConfigError
from megatron_ext.muon.optimizer import InnerOptimizer

# They say where a run lies, when it is saved and when a session ends, not what is computed.
_FREE_OPTIONS = ("run.", "checkpoint.", "data.cache", "resume", "train.stop_at", "train.log_every")


class RunState:
    """One rank's state of a run; fills megatron_ext.checkpoint's TrainingState.

    Attributes:
        step: inner steps taken.
        identity: what a resumed run must have in common with the saved one, by name.
        options: the options that decide what is computed, by dotted key.
        changed: after a resume, the options that are not what they were: key, before, now.
    """

    def __init__(
        self,
        inner: InnerOptimizer,
        outer: OuterLoop | None,
        identity: dict[str, Any],
        options: dict[str, Any],
    ):
        self.step = 0
        self.identity = identity
        self.options = {k: v for k, v in options.items() if not k.startswith(_FREE_OPTIONS)}
        self.changed: list[tuple[str, Any, Any]] = []
        self._inner = inner
        self._outer = outer

    def tensors(self) -> Iterator[StateTensor]:
        """Masters, optimizer state, anchor and outer momentum."""
        yield from self._inner.tensors()
        if self._outer:
            yield from self._outer.tensors()

    def counters(self) -> dict[str, Any]:
        """Positions in the run, and its identity."""
        counters = {
            "step": self.step,
            "optimizer_steps": self._inner.steps,
            "identity": self.identity,
            "options": self.options,
        }
        if self._outer:
            counters["outer"] = self._outer.counters()
        return counters

    def rng(self) -> torch.Tensor:
        """States of the CPU's, and of megatron-core's tracked, random generators."""
        return torch.cat(self._generators())

    def restore(self, counters: dict[str, Any], rng: torch.Tensor | None) -> None:
        """Take over what `counters` and `rng` gave; the tensors are loaded already.

        Raises ConfigError for what differs in identity.
        """
        differences = _differences(counters["identity"], self.identity)
        if differences:
            raise ConfigError(
                f"{'; '.join(differences)} in the checkpoint; a resumed run must go on with the "
                "same"
            )
        before = counters["options"]
        self.changed = [
            (key, before.get(key), now)
            for key, now in self.options.items()
            if before.get(key) != now
        ]
        self.step = counters["step"]
        self._inner.steps = counters["optimizer_steps"]
        if self._outer:
            self._outer.restore(counters["outer"])
        self._inner.write_weights()
        if rng is not None:
            self._set_generators(rng)

    def _generators(self) -> list[torch.Tensor]:
        tracked = get_cuda_rng_tracker().get_states()
        return [torch.get_rng_state(), *(tracked[name].cpu() for name in sorted(tracked))]

    def _set_generators(self, rng: torch.Tensor) -> None:
        parts = rng.split([state.numel() for state in self._generators()])
        torch.set_rng_state(parts[0])
        tracker = get_cuda_rng_tracker()
        names = sorted(tracker.get_states())
        tracker.set_states(dict(zip(names, parts[1:], strict=True)))


def _differences(saved: dict[str, Any], here: dict[str, Any], prefix: str = "") -> list[str]:
    """ "NAME is VALUE and was VALUE" for each entry that differs, also in nested dicts."""
    found = []
    for name in sorted(saved.keys() | here.keys()):
        was, now = saved.get(name), here.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found += _differences(was, now, f"{prefix}{name} ")
        elif was != now:
            found.append(f"{prefix}{name} is {now} and was {was}")
    return found
