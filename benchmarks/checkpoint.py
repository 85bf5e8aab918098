"""What a checkpoint costs: `python -m benchmarks.checkpoint [--ranks N] [--mb M] [--json]`.

Each rank holds M MB of state in tensors of 16 MB. Every figure is the median of several rounds
after a first one that is left out; in a round the things to compare take turns, so that a change in
the machine's load falls on all of them. Baseline: every rank writes the same bytes to a fresh file
with fsync. Removing older files is not timed. Training is stood for by matrix products of a fixed
size, whose rate tells what a background save takes from it.
"""

import argparse
import json
import pickle
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.processes import RankProcesses
from megatron_ext.blocks import Block
from megatron_ext.checkpoint import Checkpoints
from megatron_ext.checkpoint.folders import committed, discard
from megatron_ext.checkpoint.manifest import record
from megatron_ext.checkpoint.state import StateTensor
from megatron_ext.replicas import ParallelConfig, Replicas, join

REPEATS = 5
TENSOR_ELEMENTS = 4 * 2**20
SLICE_SECONDS = 0.05


class State:
    """A rank's share of a state: `count` tensors, each split evenly over the ranks."""

    def __init__(self, replicas: Replicas, count: int):
        ranks, rank = replicas.world_size, replicas.rank
        rows = TENSOR_ELEMENTS // 1024
        self._tensors = [
            (
                "master",
                Block(f"layers.{n}", (rows * ranks, 1024), (rows * rank, 0), (rows, 1024)),
                torch.randn(rows, 1024),
            )
            for n in range(count)
        ]

    def tensors(self) -> list[StateTensor]:
        return self._tensors

    def counters(self) -> dict[str, Any]:
        return {"step": 0}

    def rng(self) -> Tensor:
        return torch.get_rng_state()

    def accept(self, counters: dict[str, Any], path: Path) -> None:
        pass

    def restore(self, counters: dict[str, Any], rng: Tensor | None) -> None:
        pass


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--mb", type=int, default=600, help="state of each rank")
    arguments.add_argument("--folder", type=Path, help="where to write; a temporary folder")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = _on_ranks(options.ranks, Path(folder), options.mb)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        _print_table(figures, options.ranks)


def _on_ranks(ranks: int, folder: Path, mb: int) -> dict[str, float]:
    def work(rank: int) -> tuple[int, bytes]:
        try:
            with join(ParallelConfig(dp=ranks)) as replicas:
                return 0, pickle.dumps(_measure(replicas, folder, mb))
        except BaseException:
            traceback.print_exc()
            return 1, b""

    with RankProcesses(work, ranks) as processes:
        ends = {end.rank: end for end in processes.exits()}
    if any(end.status for end in ends.values()):
        sys.exit("a rank failed")
    return pickle.loads(ends[0].report)


def _measure(replicas: Replicas, folder: Path, mb: int) -> dict[str, float]:
    """Figures of rank 0, in seconds unless named otherwise."""
    count = max(1, mb * 10**6 // (4 * TENSOR_ELEMENTS))
    state = State(replicas, count)
    size_bytes = sum(tensor.nbytes for _, _, tensor in state.tensors())
    checkpoints = Checkpoints(folder / "checkpoints", replicas, keep_last=10**6)
    checkpoints.find("auto")
    step = iter(range(10**6))

    def plain() -> None:
        with (folder / f"plain-{replicas.rank}").open("wb") as file:
            for _, _, tensor in state.tensors():
                file.write(tensor.numpy().data)
            file.flush()
            torch.os.fsync(file.fileno())

    def hashed() -> None:
        record(folder / f"plain-{replicas.rank}")

    def save() -> None:
        checkpoints.save(state, next(step))

    def load() -> None:
        checkpoints.load(checkpoints.find("auto"), state)

    def round_of_all() -> dict[str, float]:
        _remove_files(replicas, folder)
        timed = {work.__name__: _timed(replicas, work) for work in (plain, hashed, save, load)}
        stall, background, rate = _save_in_background(replicas, checkpoints, state, next(step))
        alone = _training_rate(lambda: True, 1.0)
        ratios = {name: timed[name] / timed["plain"] for name in ("hashed", "save", "load")} | {
            "stall": stall / timed["save"],
            "training speed": rate / alone,
        }
        timed |= {"stall": stall, "background": background}
        return timed | {f"{name} ratio": ratio for name, ratio in ratios.items()}

    rounds = [round_of_all() for _ in range(REPEATS + 1)]
    medians = {name: statistics.median(each[name] for each in rounds[1:]) for name in rounds[0]}
    return {"mb per rank": size_bytes / 1e6, "first stall": rounds[0]["stall"], **medians}


def _remove_files(replicas: Replicas, folder: Path) -> None:
    replicas.barrier("written")
    if replicas.rank == 0:
        for path in [*folder.glob("plain-*"), *committed(folder / "checkpoints")]:
            discard(path)
    replicas.barrier("removed")


def _timed(replicas: Replicas, work: Callable[[], None]) -> float:
    replicas.barrier("start together")
    begin = time.perf_counter()
    work()
    replicas.barrier("end together")
    return time.perf_counter() - begin


def _save_in_background(
    replicas: Replicas, checkpoints: Checkpoints, state: State, step: int
) -> tuple[float, float, float]:
    """Seconds that training stood still, seconds until committed, training rate meanwhile."""
    replicas.barrier("start together")
    begin = time.perf_counter()
    checkpoints.save_in_background(state, step)
    stalled = time.perf_counter() - begin
    outcome = None

    def going_on() -> bool:
        nonlocal outcome
        outcome = outcome or checkpoints.poll()
        return outcome is None

    rate = _training_rate(going_on, 600)
    if outcome is None or outcome.error:
        raise SystemExit(f"the background save failed: {outcome}")
    return stalled, time.perf_counter() - begin, rate


def _training_rate(going_on: Callable[[], bool], limit_seconds: float) -> float:
    """Matrix products a second, while it goes on."""
    matrix = torch.randn(384, 384)
    done, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < limit_seconds and going_on():
        until = spent + SLICE_SECONDS
        while time.perf_counter() - begin < until:
            torch.mm(matrix, matrix)
            done += 1
    return done / (time.perf_counter() - begin)


def _print_table(figures: dict[str, float], ranks: int) -> None:
    print(f"{ranks} ranks with {figures['mb per rank']:.0f} MB each, median of {REPEATS} rounds\n")
    rows = [
        ("plain write with fsync", "plain", ""),
        ("SHA-256 of the same", "hashed", "{hashed ratio:.2f} × plain"),
        ("save, all included", "save", "{save ratio:.2f} × plain (goal ≤ 1.5)"),
        ("load, all included", "load", "{load ratio:.2f} × plain"),
        ("background save: stall", "stall", "{stall ratio:.1%} of save (goal ≤ 15 %)"),
        ("background save: first stall", "first stall", "allocates the copy"),
        ("background save: until committed", "background", ""),
    ]
    for text, name, remark in rows:
        print(f"{text:34} {figures[name]:8.3f} s  {remark.format(**figures)}")
    speed = figures["training speed ratio"]
    print(f"{'training while files are written':34} {speed:8.1%} of its speed")


if __name__ == "__main__":
    main()
