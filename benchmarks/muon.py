"""What a Muon step costs: `python -m benchmarks.muon [--tp 1 2 4] [--recipe NAME] [--layers N]`.

Ours against megatron-core's TensorParallelMuon in its `duplicated` mode, and in one process against
emerging-optimizers' Muon. All update the same matrices: those of a model of 4 layers, 1,024 wide,
or of a recipe. Ours also does what they leave to others: clipping, FP32 masters, AdamW for norms.
Steps alternate, so that a busy machine slows all alike. Beside the times stands what the
Newton–Schulz operations alone would take at the rate of one plain matrix product, which is measured
in the same processes. The overhead over AdamW is that of a step of 0.5 M tokens whose forward and
backward passes run at that rate as well, hence an upper bound.

On a GPU: `--tp 1 --recipe 1.76b --layers 4`, and 3.1b. All optimizers hold their states at once, so
that the whole model may not fit; fewer layers make both the steps and the training cheaper.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import Muon
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.process_groups_config import ProcessGroupCollection
from rich.console import Console
from rich.table import Table

from megatron_ext import host
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.gpt import build
from megatron_ext.model.logical import describe, kind_of, logical_shapes
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.newton_schulz import newton_schulz_flops
from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.muon.plan import StagePlan
from megatron_ext.muon.routing import route_all
from megatron_ext.muon.stage import Stage
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from pretrain.config import load
from pretrain.flops import flops_per_token

MATRICES = {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 2816}
TOKENS = 2**19
LR = 0.01


@dataclass(frozen=True)
class Figures:
    """Seconds a step on one layout; each list holds one figure for each repeat."""

    tp: int
    ours: list[float]
    theirs: list[float]
    adamw: list[float]
    bound: float  # Newton–Schulz of ours, at the rate of a plain matrix product
    bound_of_theirs: float
    training: float  # forward and backward of TOKENS at that rate, on these processes


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.as_rank:
        _as_rank(options)
        return 0
    figures = [_launch(tp, options) for tp in options.tp]
    if options.json:
        print(json.dumps([asdict(each) for each in figures]))
    else:
        _print(figures, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.muon", description=__doc__)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], help="layouts")
    parser.add_argument("--recipe", help="the model of a recipe instead of 4 layers, 1,024 wide")
    parser.add_argument("--layers", type=int, help="as many layers of a recipe's, not all")
    parser.add_argument("--arithmetic", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def _launch(tp: int, options: argparse.Namespace) -> Figures:
    """Run one layout in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={tp}", "--module", "benchmarks.muon", "--as-rank"]
    command += ["--tp", str(tp), "--arithmetic", options.arithmetic]
    command += ["--repeats", str(options.repeats)]
    command += ["--recipe", options.recipe] if options.recipe else []
    command += ["--layers", str(options.layers)] if options.layers else []
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"TP {tp} failed:\n{result.stderr}")
    return Figures(**json.loads(result.stdout.splitlines()[-1]))


def _as_rank(options: argparse.Namespace) -> None:
    (tp,) = options.tp
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // tp))
    host.prepare()
    parallel = ParallelConfig(tp=tp)
    with join(parallel):
        initialize_megatron(parallel, seed=1)
        figures = _measure(parallel, options)
        if dist.get_rank() == 0:
            print(json.dumps(asdict(figures)))


def _measure(parallel: ParallelConfig, options: argparse.Namespace) -> Figures:
    model = _model(options)
    ours = _our_step(model, parallel, "muon", options.arithmetic)
    adamw = _our_step(model, parallel, "adamw", options.arithmetic)
    theirs = _their_step(model, parallel, options.arithmetic)
    products, flops = _plain_products(model, options.arithmetic)
    steps = {"ours": ours.step, "theirs": theirs, "adamw": adamw.step, "products": products}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.repeats + 2):
        for name, step in steps.items():
            elapsed = _time(step)
            if repeat >= 2:
                seconds[name].append(elapsed)
    rate = flops / min(seconds.pop("products"))
    work = [flops * 5 for (flops,) in ours.plan.flops()]
    everything = sum(newton_schulz_flops(u.shape, 5) for u in ours.plan.matrices)
    return Figures(
        tp=parallel.tp,
        bound=max(work) / rate,
        bound_of_theirs=everything / rate,
        training=flops_per_token(model) * TOKENS / (rate * parallel.tp),
        **seconds,
    )


def _model(options: argparse.Namespace) -> ModelConfig:
    layers = {"layers": options.layers} if options.layers else {}
    if options.recipe:
        return load(options.recipe).config.model.model_copy(update=layers)
    # A small vocabulary: the comparison is of the matrices.
    return ModelConfig(vocab_size=64, sequence_length=128, **(MATRICES | layers))


@dataclass(frozen=True)
class _Ours:
    step: Callable[[], object]
    plan: StagePlan


def _our_step(model: ModelConfig, parallel: ParallelConfig, name: str, arithmetic: str) -> _Ours:
    config = OptimizerConfig(name=name, lr=LR, arithmetic=arithmetic)
    routes = route_all(model, config)
    chunks = build(model, parallel, precision="fp32", recompute="none", seed=1)
    stage = Stage(chunks, describe(chunks, model, parallel), routes, chunks[0].config)
    optimizer = InnerOptimizer(stage, config, lambda block: torch.randn(block.size))
    (part,) = stage.parts
    for parameter in part.parameters:
        parameter.main_grad.normal_()
    return _Ours(lambda: optimizer.step(LR), part.plan)


def _their_step(
    model: ModelConfig, parallel: ParallelConfig, arithmetic: str
) -> Callable[[], object]:
    """One step of upstream's optimizer on this rank's pieces of the same matrices."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameters = []
    for name, (rows, *cols) in logical_shapes(model).items():
        if kind_of(name) != "matrix":
            continue
        by_columns = name.endswith((".o", ".down"))
        shape = [rows, cols[0]]
        shape[by_columns] //= parallel.tp
        parameter = torch.nn.Parameter(torch.randn(shape, device=device))
        parameter.partition_dim = int(by_columns)
        parameter.grad = torch.randn(shape, device=device)
        parameters.append(parameter)
    options = {
        "lr": LR,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "scale_mode": "unit_rms_norm",
        "fp32_matmul_prec": {"bf16": "medium", "fp32": "highest"}[arithmetic],
    }
    if parallel.tp == 1:
        return Muon(parameters, **options).step
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return TensorParallelMuon(
        parameters, pg_collection=groups, tp_mode="duplicated", **options
    ).step


def _time(step: Callable[[], object]) -> float:
    _wait_for_all()
    started = time.perf_counter()
    step()
    _wait_for_all()
    return time.perf_counter() - started


def _wait_for_all() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def _plain_products(model: ModelConfig, arithmetic: str) -> tuple[Callable[[], object], int]:
    """Matrix products of the model's size, and how many FLOPs they are."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[arithmetic]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    square = torch.randn(model.hidden, model.hidden, device=device).to(dtype)
    wide = torch.randn(model.hidden, model.ffn, device=device).to(dtype)
    count = 20

    def multiply() -> None:
        for _ in range(count):
            square @ wide

    return multiply, count * 2 * model.hidden**2 * model.ffn


def _print(figures: list[Figures], options: argparse.Namespace) -> None:
    table = Table("TP", "ours", "upstream", "ratio", "bounds", "AdamW", "over AdamW", box=None)
    for each in figures:
        ratios = [a / b for a, b in zip(each.ours, each.theirs, strict=True)]
        more = statistics.median(each.ours) - statistics.median(each.adamw)
        table.add_row(
            str(each.tp),
            _spread(each.ours, " s"),
            _spread(each.theirs, " s"),
            _spread(ratios, ""),
            f"{each.bound:.3f} and {each.bound_of_theirs:.3f} s",
            _spread(each.adamw, " s"),
            f"{more / each.training:.2%}",
        )
    console = Console(width=150)
    model = _model(options)
    what = " × ".join(f"{name} {getattr(model, name)}" for name in MATRICES)
    console.print(f"{what}, {options.arithmetic}; median of {options.repeats} (least … most)")
    console.print(table)


def _spread(values: list[float], unit: str) -> str:
    middle = statistics.median(values)
    return f"{middle:.3f}{unit} ({min(values):.3f} … {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
