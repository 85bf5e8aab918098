"""The whole configuration tree of a run, and the checks that no section can do alone."""

import importlib.util
from typing import Any

import torch
from pydantic import Field, PositiveFloat, model_validator

from megatron_ext.checkpoint.config import CheckpointConfig
from megatron_ext.config import Section
from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.published import outer_defaults
from megatron_ext.diloco.units import check_fragments
from megatron_ext.errors import ConfigError
from megatron_ext.model import experts
from megatron_ext.model.accelerators import fused_gradients
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.fp8.config import Fp8Config, refuse_what_cannot_work
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.replicas import ParallelConfig
from pretrain.data import DataConfig
from pretrain.doctor import ResumeConfig
from pretrain.loop import TrainConfig
from pretrain.validation import ValidationConfig


class RunSection(Section):
    """Where the run lives."""

    dir: str = Field(min_length=1, json_schema_extra={"derived": "= runs/<recipe>"})
    """Folder of the run: configuration, metrics and checkpoints."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a process waits for others before it gives up and names who is missing."""


class RunConfig(Section):
    """Everything that decides what a run computes."""

    run: RunSection
    model: ModelConfig
    fp8: Fp8Config = Fp8Config()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    outer: OuterConfig = OuterConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each rank computes in one inner step."""
        return self.train.global_batch // self._sequences_at_once

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step over all replicas."""
        return self.train.global_batch * self.model.sequence_length

    @property
    def derivations(self) -> dict[str, str]:
        """Where values that were not given come from, if the option's own words do not say it."""
        if not self.outer.interval:
            return {}
        if self.outer.optimizer == "mean":
            source = "outer.optimizer=mean takes the mean as it is"
        else:
            *_, source = outer_defaults(self.optimizer.name, self.parallel.replicas)
        return {"outer.lr": source, "outer.momentum": source}

    @property
    def _sequences_at_once(self) -> int:
        return self.parallel.replicas * self.parallel.dp * self.train.micro_batch

    @model_validator(mode="before")
    @classmethod
    def _place_index_cache(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        run, data = values.get("run"), values.get("data")
        if isinstance(run, dict) and isinstance(data, dict) and data.get("cache") is None:
            return {**values, "data": {**data, "cache": f"{run.get('dir')}/index-cache"}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _take_published_outer_values(cls, values: Any) -> Any:
        """Outer learning rate and momentum, where the recipe leaves them to the method."""
        if not isinstance(values, dict) or not isinstance(values.get("outer"), dict):
            return values
        outer, inner = values["outer"], values.get("optimizer") or {}
        replicas = (values.get("parallel") or {}).get("replicas", 1)
        method = inner.get("name", "muon") if isinstance(inner, dict) else "muon"
        if not outer.get("interval") or outer.get("optimizer", "nesterov") in ("adamw", "mean"):
            return values
        if method not in ("muon", "adamw") or not isinstance(replicas, int) or replicas < 1:
            return values  # the field's own check refuses it
        lr, momentum, _ = outer_defaults(method, replicas)
        given = {key: value for key, value in outer.items() if value is not None}
        return {**values, "outer": {"lr": lr, "momentum": momentum} | given}

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        _check_layout(self.model, self.parallel, self.fp8)
        _check_fp8(self)
        _check_pipeline(self)
        _check_batch(self)
        _check_schedule(self)
        if self.outer.interval:
            check_fragments(self.model.layers, self.outer.fragments, self.outer.fragment_order)
        decay = self.optimizer.averaging.decay
        if self.outer.interval and decay:
            raise ConfigError(
                f"optimizer.averaging.decay={decay} with outer.interval={self.outer.interval}: "
                "primal averaging takes the outer step's place; set one of them to 0"
            )
        if self.checkpoint.light_every and not self.outer.interval:
            raise ConfigError(
                f"checkpoint.light_every={self.checkpoint.light_every} needs outer.interval of at "
                "least 1: a light checkpoint holds the anchor, which there is none of without"
            )
        if self.outer.interval == 0 and self.parallel.replicas > 1:
            raise ConfigError(
                f"parallel.replicas={self.parallel.replicas} needs outer.interval of at least 1; "
                "for plain data parallelism (outer.interval=0) use parallel.dp"
            )
        return self


def check_machine(config: RunConfig) -> None:
    """Refuse what this machine cannot run; the configuration itself may be right elsewhere."""
    fused_gradients(config.train.fused_gradients)
    if config.model.implementation != "transformer_engine":
        return
    option = "model.implementation=transformer_engine"
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            f"{option}: Transformer Engine is not installed here; "
            "install transformer-engine[pytorch], or use model.implementation=plain"
        )
    if not torch.cuda.is_available():
        raise ConfigError(f"{option} needs a GPU; without one use model.implementation=plain")
    if config.fp8.enabled and config.fp8.recipe == "mxfp8":
        major, minor = torch.cuda.get_device_capability()
        if major < 10:
            raise ConfigError(
                f"fp8.recipe=mxfp8 needs a Blackwell GPU; this one has compute capability "
                f"{major}.{minor}; use tensorwise, blockwise or delayed"
            )


def _check_layout(model: ModelConfig, parallel: ParallelConfig, fp8: Fp8Config) -> None:
    tp, cp = parallel.tp, parallel.cp
    experts.refuse_what_cannot_work(model, parallel, fp8)
    for name in ("vocab_size", "heads", "ffn"):
        _check_multiple(f"model.{name}", getattr(model, name), "parallel.tp", tp)
    if model.kv_heads % tp and tp % model.kv_heads:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads} must be a multiple or a divisor of parallel.tp={tp}"
        )
    if parallel.sequence_parallel:
        length = model.sequence_length
        _check_multiple("model.sequence_length", length, "parallel.tp", tp)
    if cp > 1:
        if model.implementation != "transformer_engine":
            raise ConfigError(
                f"parallel.cp={cp} needs model.implementation=transformer_engine; "
                f"{model.implementation} layers cannot share a sequence"
            )
        _check_multiple("model.sequence_length", model.sequence_length, "2 × parallel.cp", 2 * cp)


def _check_fp8(config: RunConfig) -> None:
    fp8, parallel = config.fp8, config.parallel
    if not fp8.enabled:
        return
    refuse_what_cannot_work(fp8, config.model, parallel, config.train.precision)
    tokens = config.train.micro_batch * config.model.sequence_length // parallel.cp
    if parallel.sequence_parallel:
        tokens //= parallel.tp
    if tokens % fp8.multiple:
        raise ConfigError(
            f"the {tokens} tokens of train.micro_batch={config.train.micro_batch} on a rank must "
            f"be a multiple of {fp8.multiple} for fp8.recipe={fp8.recipe}"
        )


def _check_pipeline(config: RunConfig) -> None:
    parallel = config.parallel
    chunks = parallel.pp * parallel.interleave
    _check_multiple(
        "model.layers", config.model.layers, "parallel.pp × parallel.interleave", chunks
    )
    if parallel.pp > 1 and config.model.tie_head and config.train.overlap:
        raise ConfigError(
            f"model.tie_head=true with parallel.pp={parallel.pp} refuses train.overlap=true: the "
            "first and the last stage add their gradients of the embedding after the backward "
            "pass; use train.overlap=false or model.tie_head=false"
        )


def _check_batch(config: RunConfig) -> None:
    train, parallel = config.train, config.parallel
    if train.global_batch % config._sequences_at_once:
        raise ConfigError(
            f"train.global_batch={train.global_batch} must be a multiple of "
            f"parallel.replicas={parallel.replicas} × parallel.dp={parallel.dp} × "
            f"train.micro_batch={train.micro_batch} = {config._sequences_at_once}"
        )
    if parallel.interleave > 1 and config.micro_batches % parallel.pp:
        raise ConfigError(
            f"parallel.interleave={parallel.interleave} needs micro-batches in multiples of "
            f"parallel.pp={parallel.pp}; train.global_batch={train.global_batch} gives "
            f"{config.micro_batches}"
        )


def _check_schedule(config: RunConfig) -> None:
    steps, optimizer = config.train.steps, config.optimizer
    if config.train.stop_at is not None and config.train.stop_at > steps:
        raise ConfigError(
            f"train.stop_at={config.train.stop_at} lies after the last step, train.steps={steps}"
        )
    if optimizer.decay_steps and optimizer.warmup_steps + optimizer.decay_steps > steps:
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} + "
            f"optimizer.decay_steps={optimizer.decay_steps} must not exceed train.steps={steps}"
        )

    for name in ("lr_schedule", "momentum_schedule"):
        warmup = getattr(config.outer, name).warmup_steps
        if warmup > steps:
            raise ConfigError(
                f"outer.{name}.warmup_steps={warmup} must not exceed train.steps={steps}"
            )


def _check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ConfigError(f"{name}={value} must be a multiple of {divisor_name}={divisor}")
