"""Which layouts fit on the GPUs, and which of them is fastest."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from launch.plan.memory import StageMemory, plan_memory, with_activations_of
from launch.plan.speed import StepSeconds, step_seconds
from megatron_ext.errors import ConfigError
from pretrain.flops import Device
from pretrain.settings import RunConfig

USABLE_MEMORY = 0.92
"""Share of a GPU's memory that may be planned with; the allocator's fragments take the rest."""

_TENSOR_PARALLEL = (1, 2, 4, 8)
_PIPELINE = (1, 2, 3, 4, 6, 8, 9, 12, 16)
_MICRO_BATCHES = (1, 2, 4, 8)
_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """A layout with what it needs."""

    config: RunConfig
    stages: list[StageMemory]
    step: StepSeconds

    @property
    def fullest(self) -> StageMemory:
        """The stage whose fullest rank needs most memory."""
        return max(self.stages, key=lambda stage: stage.memory.peak)


def evaluate(config: RunConfig, device: Device) -> Candidate:
    """Memory and time of one layout."""
    stages = plan_memory(config, on_gpu=True)
    return Candidate(config, stages, step_seconds(config, stages, device))


def search(config: RunConfig, gpus: int, device: Device, count: int = 5) -> list[Candidate]:
    """The `count` fastest layouts of the recipe's replicas on these GPUs that fit, best first.

    Of each TP × PP only the fastest is kept. Raises ConfigError if none fits.
    """
    best: dict[tuple[int, int], Candidate] = {}
    leanest: Candidate | None = None
    for layout in _layouts(config, gpus):
        stages = plan_memory(layout, on_gpu=True)
        for settings in _settings(layout):
            fitted = with_activations_of(settings, stages, on_gpu=True)
            candidate = Candidate(settings, fitted, step_seconds(settings, fitted, device))
            if leanest is None or _peak(candidate) < _peak(leanest):
                leanest = candidate
            if _peak(candidate) > USABLE_MEMORY * device.memory_bytes:
                continue
            key = (settings.parallel.tp, settings.parallel.pp)
            if key not in best or candidate.step.expected < best[key].step.expected:
                best[key] = candidate
    if not best:
        raise ConfigError(_nothing_fits(config, gpus, device, leanest))
    return sorted(best.values(), key=lambda candidate: candidate.step.expected)[:count]


def _layouts(config: RunConfig, gpus: int) -> Iterator[RunConfig]:
    """Each TP × PP × DP that the model, the batch and the GPUs admit."""
    for tp in _TENSOR_PARALLEL:
        for pp in _PIPELINE:
            dp, rest = divmod(gpus, config.parallel.replicas * tp * pp)
            if rest or not dp:
                continue
            parallel = {"tp": tp, "pp": pp, "cp": 1, "dp": dp, "interleave": 1}
            parallel["sequence_parallel"] = tp > 1
            with suppress(ConfigError):
                yield changed(config, {"parallel": parallel, "train": {"micro_batch": 1}})


def _settings(config: RunConfig) -> Iterator[RunConfig]:
    """Micro-batches and recomputation of one layout."""
    for micro_batch in _MICRO_BATCHES:
        for recompute in _RECOMPUTE:
            train = {"micro_batch": micro_batch, "recompute": recompute}
            with suppress(ConfigError):
                yield changed(config, {"train": train})


def changed(config: RunConfig, changes: dict[str, dict]) -> RunConfig:
    """The configuration with some options replaced. Raises ConfigError if they cannot work."""
    values = config.model_dump()
    for section, options in changes.items():
        values[section] |= options
    return RunConfig.model_validate(values)


def _peak(candidate: Candidate) -> int:
    return candidate.fullest.memory.peak


def _nothing_fits(config: RunConfig, gpus: int, device: Device, leanest: Candidate | None) -> str:
    replicas = config.parallel.replicas
    if leanest is None:
        return (
            f"--gpus {gpus} with parallel.replicas={replicas}: no layout divides the GPUs and "
            f"train.global_batch={config.train.global_batch}; change one of the three"
        )
    return (
        f"--gpus {gpus} with parallel.replicas={replicas}: the leanest layout needs "
        f"{_peak(leanest) / 1e9:.0f} GB a GPU of {device.memory_bytes / 1e9:.0f}; "
        "use more GPUs or fewer replicas"
    )
