"""Puts a run together: processes, model, optimizer, outer loop, data, checkpoints, records."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch

from megatron_ext import host
from megatron_ext.blocks import Block
from megatron_ext.checkpoint import Checkpoints, Outcome
from megatron_ext.checkpoint.state import MASTER_KIND
from megatron_ext.diloco.loop import OuterLoop, Round
from megatron_ext.errors import PeerError, StackError
from megatron_ext.model.accelerators import fused_gradients
from megatron_ext.model.gpt import build
from megatron_ext.model.initialize import draw
from megatron_ext.model.logical import describe, parameter_count
from megatron_ext.muon import routing, table
from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.muon.routing import route_all
from megatron_ext.muon.stage import Stage
from megatron_ext.muon.verify import judge, verify
from megatron_ext.replicas import Replicas, initialize_megatron, join
from pretrain import running
from pretrain.appointments import Appointments
from pretrain.config import Resolved, write
from pretrain.display import Display
from pretrain.doctor import table_text
from pretrain.engine import Engine
from pretrain.flops import utilisation
from pretrain.log import RunLog, StepRecord
from pretrain.samples import Samples
from pretrain.settings import RunConfig
from pretrain.state import RunState
from pretrain.validation import global_loss

logger = logging.getLogger(__name__)


class Session:
    """One process's parts of a run, from its start or a checkpoint on."""

    def __init__(self, resolved: Resolved, replicas: Replicas):
        self.config = config = resolved.config
        self.replicas = replicas
        initialize_megatron(config.parallel, config.train.seed, config.run.timeout_seconds)
        self.samples = Samples(config, replicas)
        routes = route_all(config.model, config.optimizer)
        self.inner = build_inner(config, routes)
        verdict = None
        if config.optimizer.self_check:
            verdict = judge(verify(self.inner), config.optimizer)
        self.engine = Engine(self.inner.stage)
        folder = Path(config.run.dir)
        self._checkpoints = Checkpoints(
            folder / "checkpoints",
            replicas,
            config.checkpoint.keep_last,
            config.checkpoint.keep_every,
            one_place=config.checkpoint.shared,
        )
        weights_from = self._take_weights()
        self.outer = None
        if config.outer.interval:
            self.outer = OuterLoop(self.inner, config.outer, replicas, config.train.steps)
        # As it comes back from a checkpoint, where a tuple is a list.
        options = json.loads(json.dumps({key: value for key, value, _ in resolved.leaves()}))
        facts = self.samples.facts | routing.identity(routes)
        scaling = self.engine.scaling
        self.state = RunState(self.inner, self.outer, self.samples, scaling, options, facts)
        resume = config.resume
        resumed_from = self._checkpoints.resume(
            resume.checkpoint, self.state, resume.inner, resume.fallback
        )
        wire_bytes = self.inner.stage.wire_bytes()
        rows = table.rows_of(self.inner)
        # One process speaks for the run.
        self._speaks = replicas.launcher_rank == 0
        self._log = self._display = None
        if self._speaks:
            write(resolved, folder / "config.yaml")
            routes_file = folder / "routing.json"
            table.write(rows, routes_file)
            self._log = RunLog(folder, self.state.step)
            self._display = Display(config.train.steps, self.state.step)
            self._announce(resumed_from, weights_from, wire_bytes)
            self._display.say(f"{table.summary(rows)}\nwith scales and homes: {routes_file}")
            if verdict:
                self._display.say(f"self-check of the optimizer: {verdict}")

    @property
    def tokens(self) -> int:
        """Tokens trained on so far, over all replicas."""
        return self.state.position.tokens

    def record(
        self, loss: float, lr: float, grad_norm: float, seconds: float, outer: list[Round]
    ) -> None:
        """Write down the inner step that was just taken, and the outer steps after it."""
        self._note_save(self._checkpoints.poll())
        if not self._speaks:
            return
        speed = self.config.tokens_per_step / seconds
        record = StepRecord(
            step=self.state.step,
            tokens=self.tokens,
            sample=self.samples.position(self.state.step - 1).sample,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens_per_second=speed,
            mfu=self._utilisation(speed),
            seconds=seconds,
        )
        if record.step % self.config.train.log_every == 0:
            self._log.step(record)
        for applied in outer:
            self._log.round(applied)
        self._display.step(record)

    def validate(self) -> None:
        """Measure and write down the loss of the global weights on held-out text."""
        loss = global_loss(self, self.config.validation.batches)
        if self._speaks:
            self._log.validation(self.state.step, self.tokens, loss, "global")
            self._display.say(f"step {self.state.step}: held-out loss {loss:.4f} (global weights)")

    def appointments(self) -> Appointments:
        """Listens for what is asked of the run while it trains."""
        config = self.config
        return Appointments(
            self.replicas, config.outer, Path(config.run.dir), config.checkpoint.every_minutes
        )

    def save(self, last: bool) -> None:
        """Write a checkpoint; return when it is written if it is the last one of this session."""
        self._note_save(self._checkpoints.wait())
        if self.outer:
            self.outer.settle()
        if self.config.checkpoint.background and not last:
            self._checkpoints.save_in_background(self.state, self.state.step)
        else:
            self._note_save(self._checkpoints.save(self.state, self.state.step))

    def save_light(self) -> None:
        """Write a checkpoint of the anchor and the outer state only."""
        self._note_save(self._checkpoints.wait())
        self.outer.settle()
        self._note_save(self._checkpoints.save_light(self.state, self.state.step))

    @contextmanager
    def rescue(self) -> Iterator[None]:
        """Where another replica is lost inside the block, save what this one has, and go on to end.

        Only for what comes after an inner step: inside one the state is of no step.
        """
        try:
            with self.replicas.guard(f"after step {self.state.step}"):
                yield
        except PeerError:
            if self.replicas.count > 1:
                self._rescue()
            raise

    def _rescue(self) -> None:
        if self.outer:
            self.outer.take_back()
        try:
            written = self._checkpoints.rescue(self.state, self.state.step)
        except StackError as error:
            logger.error("what replica %d holds is not saved: %s", self.replicas.index, error)
            return
        if written and self.replicas.rank == 0:
            logger.warning("what replica %d holds is saved: %s", self.replicas.index, written.path)

    def _note_save(self, outcome: Outcome | None) -> None:
        """Write down how a save ended. A background save that failed does not end the run."""
        if not outcome or not self._speaks:
            return
        written, step = outcome.written, outcome.step
        if written:
            self._log.event("checkpoint", step=step, bytes=written.bytes)
            self._display.say(f"step {step}: checkpoint {written.path}")
        else:
            self._log.event("checkpoint failed", step=step, error=str(outcome.error))
            self._display.say(f"error: {outcome.error}")

    def close(self, error: BaseException | None) -> None:
        """End the records; `error` is why the session ends before its time."""
        if self._speaks:
            self._log.event("end", step=self.state.step, error=str(error) if error else None)
            self._log.close()
            self._display.close()

    def _take_weights(self) -> Path | None:
        """Where the run begins anew from a checkpoint's weights: take them; returns which it is."""
        resume = self.config.resume
        if not resume.weights or self._checkpoints.find(resume.checkpoint):
            return None
        masters = [tensor for tensor in self.inner.tensors() if tensor[0] == MASTER_KIND]
        chosen = self._checkpoints.load_weights(Path(resume.weights), masters)
        self.inner.restart()
        return chosen

    def _announce(
        self, resumed_from: Path | None, weights_from: Path | None, wire_bytes: int
    ) -> None:
        config, parallel, say = self.config, self.config.parallel, self._display.say
        layout = " × ".join(f"{n} {getattr(parallel, n)}" for n in ("tp", "pp", "cp", "dp"))
        if parallel.ep > 1:
            layout += f", experts over ep {parallel.ep}"
        say(f"run folder  {config.run.dir}")
        say(f"model       {parameter_count(config.model):,} parameters")
        say(
            f"layout      {parallel.replicas} × ({layout}) = {parallel.world_size} processes, "
            f"{config.tokens_per_step:,} tokens a step"
        )
        say(
            f"optimizer   {config.optimizer.name}"
            + (f", an outer step every {config.outer.interval}" if self.outer else "")
        )
        if not resumed_from:
            weights = str(weights_from) if weights_from else None
            self._log.event(
                "start", step=0, weights=weights, data_parallel_bytes_per_step=wire_bytes
            )
            if weights:
                say(f"weights     {weights}; step, optimizer and data begin anew")
            return
        findings = self.state.findings
        changed = {found.name: [found.checkpoint, found.requested] for found in findings}
        position = asdict(self.state.position)
        self._log.event("resume", **position, checkpoint=str(resumed_from), changed=changed)
        say(f"resuming    {resumed_from}, after step {self.state.step} of {config.train.steps}")
        if findings:
            say(table_text(findings))
        if config.fp8.enabled and config.fp8.recipe == "delayed" and not config.fp8.emulated:
            say("fp8         Transformer Engine's history of maxima begins afresh")
        if self.state.step >= (config.train.stop_at or config.train.steps):
            say("nothing to do: the run is there already")

    def _utilisation(self, tokens_per_second: float) -> float | None:
        if not torch.cuda.is_available():
            return None
        devices = self.config.parallel.world_size
        name = torch.cuda.get_device_name()
        config = self.config
        return utilisation(tokens_per_second, config.model, devices, name, config.fp8)


@contextmanager
def open_session(resolved: Resolved) -> Iterator[Session]:
    """Take this process's place in the run and put its parts together."""
    config = resolved.config
    host.prepare()
    with join(config.parallel, config.run.timeout_seconds) as replicas:
        is_first = replicas.launcher_rank == 0
        with running.noted(Path(config.run.dir)) if is_first else nullcontext():
            with replicas.guard("start"):
                session = Session(resolved, replicas)
            error = None
            try:
                yield session
            except BaseException as caught:
                error = caught
                raise
            finally:
                session.close(error)


def build_inner(config: RunConfig, routes: dict) -> InnerOptimizer:
    """The model of this rank, under DDP, and its optimizer."""
    model, train = config.model, config.train
    chunks = build(
        model,
        config.parallel,
        precision=train.precision,
        recompute=train.recompute,
        seed=train.seed,
        fp8=config.fp8,
        fused_gradients=fused_gradients(train.fused_gradients),
    )
    logical = describe(chunks, model, config.parallel)
    stage = Stage(chunks, logical, routes, chunks[0].config, overlap=train.overlap)
    # Blocks of one parameter come one after another.
    whole = lru_cache(maxsize=1)(lambda name: draw(name, model, train.seed))

    def initial(block: Block) -> torch.Tensor:
        return whole(block.name)[block.slices]

    return InnerOptimizer(stage, config.optimizer, initial)
