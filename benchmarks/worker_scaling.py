"""Held-out loss over the number of replicas: MuLoCo, DiLoCo, GPA, data parallelism; equal tokens.

The demo's model (1,067,392 parameters) and corpus, 0.5M tokens a run, real processes. Each inner
optimizer's learning rate is tuned on three points for data parallelism, at K = 1 and at K = 8 with
the first seed; K = 2 takes K = 1's and K = 4 takes K = 8's, GPA data parallelism's. Outer learning
rate and momentum are the published ones by K (interpolated at 2 and 4). The batch is 2,048 tokens
over all replicas, so that a run has 244 steps and, with H = 10, 24 outer steps. GPA's average is as
long as the round: 1 − μ_x = 0.0033 · 32 / H, from its published value for 32 steps.

    .venv/bin/python -m benchmarks.worker_scaling [--tokens 500000] [--seeds 2]

About an hour on two cores. Finished runs are kept in --folder, and the same command goes on.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from matplotlib.figure import Figure

from launch.local import supervise
from pretrain import exit
from pretrain.config import load
from pretrain.demo import CORPUS, JOURNEY, TOKENS
from pretrain.loop import train
from pretrain.run_folder import RunFolder

SEQUENCES, LENGTH, INTERVAL = 16, 128, 10
REPLICAS = (1, 2, 4, 8)
RATES = {"muon": (0.01, 0.02, 0.04), "adamw": (0.0015, 0.003, 0.006)}
TUNED_AT = {1: 1, 2: 1, 4: 8, 8: 8}
LOCO = {"muon": "MuLoCo", "adamw": "DiLoCo"}
NAMES = {"muon": "Muon", "adamw": "AdamW"}
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Setting:
    """What is trained; without an outer loop `replicas` is 0."""

    inner: str
    replicas: int = 0
    bits: int | None = None
    gpa: bool = False

    @property
    def name(self) -> str:
        if self.gpa:
            return f"GPA {NAMES[self.inner]}"
        if not self.replicas:
            return f"data-parallel {NAMES[self.inner]}"
        bits = f", {self.bits}-bit + EF" if self.bits else ""
        return f"{LOCO[self.inner]} K={self.replicas}{bits}"

    @property
    def tuned_as(self) -> "Setting":
        """The setting whose learning rate it takes."""
        return Setting(self.inner, TUNED_AT.get(self.replicas, 0))

    def overrides(self) -> dict[str, object]:
        options: dict[str, object] = {
            "outer.interval": INTERVAL if self.replicas else 0,
            "parallel.replicas": max(1, self.replicas),
            "train.micro_batch": min(8, SEQUENCES // max(1, self.replicas)),
        }
        if self.replicas:
            options |= {"outer.lr": "null", "outer.momentum": "null"}
        if self.bits:
            options |= {"outer.codec": "linear", "outer.bits": self.bits, "outer.per_row": "true"}
            options["outer.error_feedback"] = "true"
        if self.gpa:
            options["optimizer.averaging.decay"] = 1 - 0.0033 * 32 / INTERVAL
        return options


@dataclass(frozen=True)
class Trial:
    """One run."""

    setting: Setting
    lr: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.setting.name}, lr {self.lr:g}, seed {self.seed}"


SETTINGS = [
    *(Setting(inner) for inner in NAMES),
    *(Setting(inner, gpa=True) for inner in NAMES),
    *(Setting(inner, k) for k, inner in itertools.product(REPLICAS, NAMES)),
    *(Setting(inner, 8, bits) for bits, inner in itertools.product((4, 2), NAMES)),
]


class Trials:
    """Runs trials, and remembers in a file what came out."""

    def __init__(self, folder: Path, tokens: int):
        self._folder = folder
        self._steps = tokens // (SEQUENCES * LENGTH)
        self._file = folder / f"losses-{self._steps}.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.losses = {line["key"]: line["loss"] for line in map(json.loads, lines)}

    def loss(self, trial: Trial) -> float:
        """Held-out loss of the global weights at the end, in nats a token."""
        if trial.key not in self.losses:
            started = time.monotonic()
            loss = self._train(trial)
            seconds = time.monotonic() - started
            record = {"key": trial.key, **asdict(trial), "loss": loss, "seconds": seconds}
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")
            self.losses[trial.key] = loss
            print(f"{trial.key}: {loss:.4f} ({seconds:.0f} s)", flush=True)
        return self.losses[trial.key]

    def _train(self, trial: Trial) -> float:
        run_dir = self._folder / "runs" / trial.key.replace(", ", "-").replace(" ", "_")
        options = {
            "data.blend": self._folder / TOKENS / "blend.yaml",
            "data.cache": self._folder / f"cache-{trial.seed}",
            "run.dir": run_dir,
            "resume": "none",
            "train.steps": self._steps,
            "train.global_batch": SEQUENCES,
            "train.seed": trial.seed,
            "optimizer.name": trial.setting.inner,
            "optimizer.lr": trial.lr,
            "optimizer.warmup_steps": self._steps // 10,
            "validation.every": self._steps,
            "validation.batches": 32,
            **trial.setting.overrides(),
        }
        resolved = load("demo", [f"{key}={value}" for key, value in options.items()])
        with (self._folder / "log.txt").open("a") as log, redirect_stdout(log):
            supervise(lambda: train(resolved), resolved.config.parallel)
        return RunFolder(run_dir).records("validation")[-1]["loss"]


def tune(trials: Trials) -> Iterator[tuple[Setting, float]]:
    """(setting, its best learning rate) of those that are tuned."""
    for setting in dict.fromkeys(setting.tuned_as for setting in SETTINGS):
        rates = RATES[setting.inner]
        losses = [trials.loss(Trial(setting, lr, seed=1)) for lr in rates]
        yield setting, rates[losses.index(min(losses))]


def prepare(folder: Path) -> None:
    """The demo's corpus, tokenizer and tokens, below `folder`."""
    if (folder / TOKENS / "blend.yaml").exists():
        return
    (folder / CORPUS).parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for _, command in JOURNEY[:3]:
        line = [sys.executable, "-m", *command.split()]
        subprocess.run(line, cwd=folder, env=environment, check=True)


def as_table(losses: dict[Setting, list[float]], rates: dict[Setting, float]) -> list[str]:
    """Markdown: mean and spread of the seeds, and against data parallelism of the same inner."""
    lines = [
        "| method | learning rate | held-out loss | ± | against data parallelism |",
        "|---|--:|--:|--:|--:|",
    ]
    for setting, values in losses.items():
        mean, base = statistics.mean(values), statistics.mean(losses[Setting(setting.inner)])
        spread = (max(values) - min(values)) / 2
        lines.append(
            f"| {setting.name} | {rates[setting.tuned_as]:g} | {mean:.4f} | {spread:.4f} | "
            f"{mean / base - 1:+.2%} |"
        )
    return lines


def findings(losses: dict[Setting, list[float]]) -> list[str]:
    """What the paper says, and whether it came out so."""
    mean = {setting: statistics.mean(values) for setting, values in losses.items()}
    gaps = [mean[Setting("adamw", k)] - mean[Setting("muon", k)] for k in REPLICAS]
    packed = [mean[Setting("muon", 8, 4)] / mean[Setting("muon", 8)] - 1]
    packed.append(mean[Setting("adamw", 8, 4)] / mean[Setting("adamw", 8)] - 1)
    listed = ", ".join(f"K={k}: {gap:+.4f}" for k, gap in zip(REPLICAS, gaps, strict=True))
    return [
        f"- MuLoCo below DiLoCo at every K: {_yes(min(gaps) > 0)} (DiLoCo − MuLoCo: {listed})",
        f"- the gap grows with K: {_yes(gaps == sorted(gaps))}",
        f"- 4-bit within 0.5 % of uncompressed at K=8: {_yes(max(packed) <= 0.005)} "
        f"(MuLoCo {packed[0]:+.2%}, DiLoCo {packed[1]:+.2%})",
    ]


def plot(losses: dict[Setting, list[float]], path: Path) -> None:
    """Loss over the number of replicas; data parallelism and GPA as lines across."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for inner, colour in (("muon", "#0072B2"), ("adamw", "#D55E00")):
        curve = [losses[Setting(inner, k)] for k in REPLICAS]
        means = [statistics.mean(values) for values in curve]
        axes.plot(REPLICAS, means, color=colour, marker="o", label=LOCO[inner])
        for k, values in zip(REPLICAS, curve, strict=True):
            axes.plot([k] * len(values), values, color=colour, marker="_", linewidth=0.8)
        for bits, marker in ((4, "s"), (2, "^")):
            value = statistics.mean(losses[Setting(inner, 8, bits)])
            label = f"{LOCO[inner]}, {bits}-bit + EF"
            axes.plot(8, value, color=colour, marker=marker, fillstyle="none", label=label, ls="")
        across = ((Setting(inner), "--"), (Setting(inner, gpa=True), ":"))
        for setting, style in across:
            mean = statistics.mean(losses[setting])
            axes.axhline(mean, color=colour, linestyle=style, linewidth=1, label=setting.name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(REPLICAS, [str(k) for k in REPLICAS])
    axes.set_xlabel("replicas K, equal tokens")
    axes.set_ylabel("held-out loss of the global weights, nats a token")
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run what has not run yet; print and write the table and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=500_000, help="of each run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/worker-scaling"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    exit.quieten_imports()
    prepare(options.folder)
    trials = Trials(options.folder, options.tokens)
    rates = dict(tune(trials))
    losses = {
        setting: [
            trials.loss(Trial(setting, rates[setting.tuned_as], seed))
            for seed in range(1, options.seeds + 1)
        ]
        for setting in SETTINGS
    }
    lines = [
        "# Held-out loss against the number of replicas",
        "",
        f"`python -m benchmarks.worker_scaling --tokens {options.tokens} --seeds {options.seeds}`, "
        f"{date.today()}, {_machine()}.",
        "",
        *as_table(losses, rates),
        "",
        *findings(losses),
        "",
        "![loss over K](worker_scaling.svg)",
    ]
    print("\n".join(lines))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "worker_scaling.md").write_text("\n".join(lines) + "\n")
    plot(losses, options.output / "worker_scaling.svg")


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _machine() -> str:
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = models[0] if models else platform.processor()
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


if __name__ == "__main__":
    main()
