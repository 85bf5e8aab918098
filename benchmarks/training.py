"""Tokens/s of the training loop against a bare megatron-core loop of the same model and layout.

Bare: the same model and data in memory, megatron-core's schedule and DDP, torch's AdamW, and
nothing else: no records, no progress, no outer loop, no checks. Ours: `pretrain.loop.run` as it is,
reading indexed binaries, with AdamW and with Muon. Both sides alternate in one run.

    .venv/bin/python -m benchmarks.training [--tp 2] [--dp 2] [--pairs 5] [--steps 30]
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext import host
from megatron_ext.model.gpt import build
from megatron_ext.replicas import initialize_megatron, join
from pretrain import exit, loop
from pretrain.config import load
from pretrain.samples import Samples
from pretrain.session import open_session
from tests.pretrain.corpus import write_corpus
from tests.ranks import run

# The first steps allocate and compile.
_WARM_UP = 5


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in (("tp", 2), ("dp", 1), ("pairs", 5), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    exit.quieten_imports()
    with tempfile.TemporaryDirectory() as folder:
        blend = write_corpus(Path(folder), documents=4000)
        speeds: dict[str, list[float]] = {"bare": [], "ours, adamw": [], "ours, muon": []}
        for pair in range(options.pairs):
            for side in speeds:
                overrides = _overrides(options, blend, Path(folder) / f"{pair}-{side}", side)
                ranks = options.tp * options.dp
                measure = _bare if side == "bare" else _ours
                seconds = run(measure, ranks, overrides, timeout=600)[0]
                tokens = load("demo", overrides).config.tokens_per_step
                speeds[side].append(tokens / statistics.median(seconds))
    _print(speeds, options)


def _overrides(options: argparse.Namespace, blend: Path, folder: Path, side: str) -> list[str]:
    values: dict[str, Any] = {
        "data.blend": blend,
        "run.dir": folder,
        "parallel.tp": options.tp,
        "parallel.dp": options.dp,
        "train.steps": options.steps + _WARM_UP,
        "outer.interval": 0,
        "validation.every": 0,
        "optimizer.name": "muon" if side == "ours, muon" else "adamw",
    }
    return [f"{key}={value}" for key, value in values.items()]


def _ours(rank: int, overrides: list[str]) -> list[float]:
    """Seconds from one step's record to the next: all that the loop does is in between."""
    ends = []
    with open_session(load("demo", overrides)) as session:
        record = session.record

        def timed(*arguments: Any) -> None:
            record(*arguments)
            ends.append(time.perf_counter())

        session.record = timed
        loop.run(session)
    return [end - start for start, end in itertools.pairwise(ends)][_WARM_UP:]


def _bare(rank: int, overrides: list[str]) -> list[float]:
    config = load("demo", overrides).config
    host.prepare()
    with join(config.parallel, 60) as replicas:
        initialize_megatron(config.parallel, 1)
        batches = list(Samples(config, replicas).micro_batches(1))
        (model,) = build(config.model, config.parallel, precision="fp32", recompute="none", seed=1)
        ddp = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        seconds = []
        for _ in range(config.train.steps):
            started = time.perf_counter()
            _bare_step(ddp, optimizer, parameters, batches)
            seconds.append(time.perf_counter() - started)
    return seconds[_WARM_UP:]


def _bare_step(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    batches: list[dict[str, torch.Tensor]],
) -> None:
    ddp.zero_grad_buffer()
    micro_batch, sequence = batches[0]["tokens"].shape
    get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter(batches),
        model=ddp,
        num_microbatches=len(batches),
        seq_length=sequence,
        micro_batch_size=micro_batch,
        forward_only=False,
    )
    for parameter in parameters:
        parameter.grad = parameter.main_grad
    gradients = [parameter.grad for parameter in parameters]
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(square)
    torch._foreach_mul_(gradients, (1 / square.sqrt()).clamp_max(1.0))
    optimizer.step()


def _forward(batches: Any, model: torch.nn.Module) -> tuple:
    batch = next(batches)

    def loss(losses: torch.Tensor) -> tuple:
        total = losses.sum()
        return total, torch.tensor(losses.numel(), dtype=torch.int), {"loss": total.detach()}

    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, loss


def _print(speeds: dict[str, list[float]], options: argparse.Namespace) -> None:
    print(f"tp={options.tp} dp={options.dp}, {options.pairs} rounds of {options.steps} steps")
    print(f"{'':<12}  {'tokens/s':>9}  {'of bare':>8}  {'least':>6}  {'most':>6}")
    for side, values in speeds.items():
        ratios = [ours / bare for ours, bare in zip(values, speeds["bare"], strict=True)]
        print(
            f"{side:<12}  {statistics.median(values):>9,.0f}  {statistics.median(ratios):>8.3f}  "
            f"{min(ratios):>6.3f}  {max(ratios):>6.3f}"
        )


if __name__ == "__main__":
    main()
