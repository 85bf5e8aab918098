"""What an exchange between replicas takes: codecs alone, whole exchanges, and what training waits.

1. Codecs: GB/s of FP32 values on one core, a matrix of 4,096 × 4,096.
2. An exchange of 100M values on loopback gloo, by K and bits, beside torch's all-reduce and, where
   it is installed, torchft's DiLoCo collective, an all-reduce for each tensor (its packed wire
   needs a GPU). All sides take turns in one run.
3. The same with two replicas over a link slowed to 1 Gbit/s and 100 Mbit/s.
4. Training on such a link: the seconds that training stands still for outer steps, applied at once
   and applied some inner steps later.

    .venv/bin/python -m benchmarks.outer_loop [--quick] [--replicas 2 4 8]

torchft has no place in requirements.txt: `pip install --target DIR torchft==0.2.0`, PYTHONPATH=DIR.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from launch.local import supervise
from megatron_ext import host
from megatron_ext.blocks import Block
from megatron_ext.diloco import codecs
from megatron_ext.diloco.collective import Collective
from megatron_ext.diloco.plan import plan_buckets
from megatron_ext.diloco.units import units_of
from megatron_ext.diloco.wire import LinkConfig, Wire
from megatron_ext.muon.views import total_numel, views
from megatron_ext.replicas import ParallelConfig, Replicas, join
from pretrain import exit
from pretrain.config import load
from pretrain.loop import train
from pretrain.run_folder import RunFolder
from tests.pretrain.corpus import write_corpus
from tests.ranks import run

CODECS = {
    "fp32": {"kind": "fp32"},
    "bf16": {"kind": "bf16"},
    **{f"linear {bits}-bit": {"kind": "linear", "bits": bits} for bits in (8, 4, 2)},
    "linear 4-bit, by row": {"kind": "linear", "bits": 4, "per_row": True},
    **{f"statistical {bits}-bit": {"kind": "statistical", "bits": bits} for bits in (4, 2)},
    "top 1/64 of 4,096": {"kind": "topk", "keep": 1 / 64, "chunk": 4096},
}
WIRES = {32: {"kind": "fp32"}} | {b: {"kind": "linear", "bits": b} for b in (8, 4, 2)}


def units_of_model(layers: int) -> list[Block]:
    """Of a model 768 wide; 12 layers are 100.7M values."""
    shapes = {"embedding": (20480, 768)}
    for layer in range(layers):
        for name in "qkvo":
            shapes[f"layers.{layer}.attention.{name}"] = (768, 768)
        for name, shape in (("gate", (2048, 768)), ("up", (2048, 768)), ("down", (768, 2048))):
            shapes[f"layers.{layer}.mlp.{name}"] = shape
    return [unit for name, shape in shapes.items() for unit in units_of(name, shape)]


def codec_speeds(repeats: int) -> Table:
    """GB/s of FP32 on one core."""
    torch.set_num_threads(1)
    values = torch.randn(4096, 4096)
    table = _table("one core, GB/s of FP32", "encode", "decode", "bytes a value")
    for name, options in CODECS.items():
        codec = codecs.make(**options)
        packed = codec.encode(values)
        speeds = [
            [values.nbytes / 1e9 / _seconds(work) for _ in range(repeats)]
            for work in (
                lambda: codec.encode_into(values, packed.payload),  # noqa: B023
                lambda: codec.decode_into(packed.payload, values),  # noqa: B023
            )
        ]
        values.normal_()
        table.add_row(name, *map(_spread, speeds), f"{packed.nbytes / values.numel():.3f}")
    return table


def exchanges(rank: int, replicas: int, layers: int, repeats: int, link: dict) -> dict[str, list]:
    """Seconds of each side's exchanges of the same values, as one replica sees them."""
    host.prepare()
    with join(ParallelConfig(replicas=replicas), 600) as meeting:
        torch.set_num_threads(1)
        units = units_of_model(layers)
        flat = torch.randn(total_numel([unit.size for unit in units]))
        sides: dict[str, Callable[[], object]] = {}
        for bits in (32, 4) if link else WIRES:
            codec = codecs.make(**WIRES[bits])
            buckets = plan_buckets(units, [codec] * len(units), replicas, shift=0)
            collective = Collective(Wire(meeting.link, LinkConfig(**link)), buckets)
            sides[f"ours, {bits} bits"] = lambda c=collective: c.reduce(flat, [1.0] * replicas)
        if not link:
            sides["torch all-reduce"] = lambda: meeting.link.allreduce([flat]).wait()
            theirs = torchft_all_reduce(meeting, views(flat, [unit.size for unit in units]))
            if theirs:
                sides["torchft, fp32"] = theirs
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(repeats + 1):
            for side, work in sides.items():
                flat.normal_()
                meeting.link.barrier().wait()
                took = _seconds(work)
                if repeat:  # the first allocates
                    seconds[side].append(took)
        return seconds


def torchft_all_reduce(
    replicas: Replicas, tensors: list[torch.Tensor]
) -> Callable[[], None] | None:
    """What torchft's DiLoCo does with pseudogradients in FP32; None where it is not installed."""
    try:
        from torchft.process_group import ProcessGroupGloo
    except ImportError:
        return None
    group = ProcessGroupGloo(timedelta(seconds=600))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/torchft"
    group.configure(address, "bench", replicas.index, replicas.count)
    options = torch.distributed.AllreduceOptions()

    def work() -> None:
        for started in [group.allreduce([tensor], options) for tensor in tensors]:
            started.wait()

    return work


def exchange_table(replicas: list[int], layers: int, repeats: int) -> Table:
    numel = total_numel([unit.size for unit in units_of_model(layers)])
    columns = [f"K={k}, s" for k in replicas]
    table = _table(f"{numel / 1e6:.0f}M values, loopback", *columns)
    found = [run(exchanges, k, k, layers, repeats, {}, timeout=900)[0] for k in replicas]
    for side in found[0]:
        table.add_row(side, *(_spread(seconds[side]) for seconds in found))
    for side in [side for side in found[0] if side.startswith("ours")]:
        base = [seconds["torch all-reduce"] for seconds in found]
        ratios = [
            _spread([mine / its for mine, its in zip(seconds[side], theirs, strict=True)])
            for seconds, theirs in zip(found, base, strict=True)
        ]
        table.add_row(f"{side} ÷ torch all-reduce", *ratios)
    return table


def slow_link_table(layers: int, repeats: int) -> Table:
    numel = total_numel([unit.size for unit in units_of_model(layers)])
    title = f"{numel / 1e6:.0f}M values, K=2, slowed link"
    table = _table(title, "32 bits, s", "4 bits, s", "times faster", "wire alone, 4 bits, s")
    for gbit in (1.0, 0.1):
        seconds = run(exchanges, 2, 2, layers, repeats, {"gbit": gbit}, timeout=900)[0]
        exact, packed = seconds["ours, 32 bits"], seconds["ours, 4 bits"]
        ratios = [slow / fast for slow, fast in zip(exact, packed, strict=True)]
        wire = numel * 4 / 8 * 8e-9 / gbit
        table.add_row(
            f"{gbit:g} Gbit/s", _spread(exact), _spread(packed), _spread(ratios), f"{wire:.2f}"
        )
    return table


def exposed_table(steps: int) -> Table:
    """The demo's model, two replicas, FP32 on a link that takes about two inner steps."""
    link = 0.1
    table = _table(
        f"training, K=2, {link:g} Gbit/s", "stood still, s", "of that", "exchange, s", "step, s"
    )
    first = None
    with tempfile.TemporaryDirectory() as folder:
        blend = write_corpus(Path(folder), documents=2000)
        for delay in (0, 8):
            options = {
                "data.blend": blend,
                "run.dir": f"{folder}/{delay}",
                "parallel.replicas": 2,
                "train.steps": steps,
                "outer.interval": 10,
                "outer.delay": delay,
                "outer.link.gbit": link,
                "validation.every": 0,
            }
            resolved = load("demo", [f"{key}={value}" for key, value in options.items()])
            with redirect_stdout(StringIO()):
                supervise(lambda: train(resolved), resolved.config.parallel)  # noqa: B023
            records = RunFolder(Path(folder) / str(delay))
            # The last step of a run sends and applies everything at once.
            rounds = [r for r in records.records("rounds") if r["sent"] + delay == r["step"]]
            rounds = [r for r in rounds if r["step"] < steps]
            exposed = sum(r["exposed_seconds"] for r in rounds)
            first = first or exposed
            exchange = statistics.median(r["seconds"] for r in rounds)
            step = statistics.median(r["seconds"] for r in records.records("metrics"))
            name = f"applied {delay} inner steps later" if delay else "applied at once"
            table.add_row(
                name, f"{exposed:.2f}", f"{exposed / first:.1%}", f"{exchange:.2f}", f"{step:.2f}"
            )
    return table


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model, once")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    exit.quieten_imports()
    layers, slow_layers, repeats = (1, 1, 1) if options.quick else (12, 4, 3)
    console = Console(width=120, highlight=False)
    console.print(codec_speeds(repeats=2 if options.quick else 7))
    if importlib.util.find_spec("torchft") is None:
        console.print("torchft is not installed; its row of the next table is left out")
    console.print(exchange_table(options.replicas, layers, repeats))
    console.print(slow_link_table(slow_layers, repeats))
    console.print(exposed_table(steps=41 if options.quick else 81))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title, box=None, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


if __name__ == "__main__":
    main()
