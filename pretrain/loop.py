"""The training loop."""

import time
from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megatron_ext.config import Section
from pretrain.schedule import learning_rate

if TYPE_CHECKING:
    from pretrain.config import Resolved
    from pretrain.session import Session


class TrainConfig(Section):
    """How long to train, on how much at a time, and in which arithmetic."""

    steps: PositiveInt
    """Inner steps of the whole run."""
    global_batch: PositiveInt
    """Sequences in one inner step, summed over all replicas."""
    micro_batch: PositiveInt
    """Sequences that one rank computes at a time."""
    seed: NonNegativeInt = 1234
    """Seed of initial weights and of the order of samples."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model; master weights are fp32 either way."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, feed-forward only, whole layers."""
    overlap: bool = False
    """Overlap gradient reduction and parameter gather with computation."""
    fused_gradients: bool | None = Field(None, json_schema_extra={"derived": "where it is there"})
    """Add weight gradients into the FP32 buffer within the product: apex's extension on a GPU."""
    log_every: PositiveInt = 1
    """Inner steps between lines of metrics.jsonl."""
    stop_at: PositiveInt | None = None
    """End this session after the given step, with a checkpoint."""


def train(resolved: "Resolved") -> None:
    """Train as one process of a run, until its last step or `train.stop_at`."""
    from pretrain.session import open_session  # megatron-core: too slow for --help and --show

    with open_session(resolved) as session:
        run(session)


def run(session: "Session") -> None:
    """The inner steps, the outer steps among them, and what is measured and saved on the way."""
    config, state = session.config, session.state
    steps = config.train.steps
    stop = config.train.stop_at or steps
    if state.step == 0 and config.validation.every:
        session.validate()
    with session.appointments() as appointments:
        while state.step < stop:
            started = time.perf_counter()
            step = state.step + 1
            last = step == steps
            session.replicas.progress(step)
            appointments.begin(step)
            with session.replicas.guard(f"step {step}"):
                lr = learning_rate(step, steps, config.optimizer)
                loss, tokens = session.engine.train(session.samples.micro_batches(step))
                grad_norm = session.inner.step(lr)
                state.step = step
                with session.rescue():
                    outer = session.outer.step(step, tokens, last) if session.outer else []
                    session.record(loss, lr, grad_norm, time.perf_counter() - started, outer)
                    if _due(step, config.validation.every, last):
                        session.validate()
                    asked = appointments.due(step)
                    ends = step == stop or asked == "end"
                    if ends or asked or _due(step, config.checkpoint.every):
                        session.save(last=ends)
                    elif _due(step, config.checkpoint.light_every):
                        session.save_light()
            if ends:
                break


def _due(step: int, every: int, last: bool = False) -> bool:
    return every > 0 and (step % every == 0 or last)
