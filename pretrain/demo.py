"""`make demo`: the whole journey on real text, on a processor, in a few minutes.

Text → tokenizer → indexed binaries → MuLoCo on two replicas of two tensor-parallel ranks, stopped
and resumed on the way → the same tokens with data parallelism → a table of what came out.
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pretrain import exit
from pretrain.data import BlendFile
from pretrain.run_folder import RunFolder

FOLDER = Path("demo")
CORPUS, TOKENIZER, TOKENS = FOLDER / "corpus", FOLDER / "tokenizer.model", FOLDER / "tokens"
MULOCO, DATA_PARALLEL = FOLDER / "muloco", FOLDER / "data-parallel"
STOP_AT = 85

JOURNEY = [
    ("Text from the documentation on this machine", f"data_prep sample {CORPUS}"),
    ("A tokenizer", f"data_prep train-tokenizer {CORPUS} --vocab-size 1024 --output {TOKENIZER}"),
    (
        "Indexed binaries, 2 % of the documents held out",
        f"data_prep tokenize {CORPUS} --tokenizer {TOKENIZER} --output {TOKENS} --validation 2%",
    ),
    (
        f"MuLoCo: two replicas of two tensor-parallel ranks, until step {STOP_AT}",
        f"launch local demo --replicas 2 --tp 2 run.dir={MULOCO} train.stop_at={STOP_AT}",
    ),
    (
        "Without the stop: it resumes",
        f"launch local demo --replicas 2 --tp 2 run.dir={MULOCO}",
    ),
    (
        "The same tokens with data parallelism instead",
        f"launch local demo --tp 2 --dp 2 outer.interval=0 run.dir={DATA_PARALLEL}",
    ),
]

NEXT = [
    ("one replica with an outer step (MuLoCo-1)", "launch local demo --tp 2 run.dir=runs/one"),
    (
        "DiLoCo: AdamW inside",
        "launch local demo --replicas 2 run.dir=runs/diloco optimizer.name=adamw optimizer.lr=3e-3",
    ),
    ("every option of the 15B recipe", "pretrain 15b data.blend=demo/tokens/blend.yaml --show"),
]


def main() -> int:
    """Run the journey; returns the exit code of the first command that fails."""
    exit.quieten_imports()
    # An exception ends the running command too, and with it its processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    for number, (title, command) in enumerate(JOURNEY, start=1):
        console.print(f"\n[bold]{number}/{len(JOURNEY)} {title}[/bold]\n$ python -m {command}")
        done = subprocess.run([sys.executable, "-m", *command.split()], check=False)
        if done.returncode:
            return done.returncode
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    console.print(f"\n[bold]What came out, after {minutes} min {seconds} s[/bold]")
    console.print(_table())
    console.print(
        f"The text's unigram entropy is {_unigram_entropy():.3f} nats a token: what a model that "
        "ignores context could reach."
    )
    console.print(f"Runs: {MULOCO}/ and {DATA_PARALLEL}/ (config.yaml, *.jsonl, checkpoints/)")
    console.print(f"Data: {CORPUS}/, {TOKENIZER}, {TOKENS}/")
    console.print("\n[bold]Try next[/bold]")
    for title, command in NEXT:
        console.print(f"# {title}\n.venv/bin/python -m {command}")
    return 0


def _table() -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for title in ("MuLoCo, K = 2", "data-parallel Muon"):
        table.add_column(title, justify="right")
    columns = [_column(MULOCO), _column(DATA_PARALLEL)]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _column(run: Path) -> dict[str, str]:
    folder = RunFolder(run)
    validation, metrics = folder.records("validation"), folder.records("metrics")
    start = next(event for event in folder.records("events") if event["event"] == "start")
    if rounds := folder.records("rounds"):
        sent = sum(line["bytes_sent"] for line in rounds)
    else:
        sent = start["data_parallel_bytes_per_step"] * metrics[-1]["step"]
    speed = metrics[-1]["tokens"] / sum(line["seconds"] for line in metrics)
    return {
        "held-out loss at the start": f"{validation[0]['loss']:.4f}",
        "held-out loss at the end (global weights)": f"{validation[-1]['loss']:.4f}",
        "tokens": f"{metrics[-1]['tokens']:,}",
        "tokens/s, outer steps included": f"{speed:,.0f}",
        "sent by each to the other, MB": f"{sent / 1e6:,.1f}",
    }


def _unigram_entropy() -> float:
    """−Σ p log p over the training tokens, in nats."""
    file = BlendFile(TOKENS / "blend.yaml")
    counts = np.zeros(file.blend.tokenizer.vocab_size, dtype=np.int64)
    for part in file.blend.train:
        binary, _ = file.files(part)
        # A vocabulary of 1,024 is stored in 16 bits.
        counts += np.bincount(np.fromfile(binary, dtype=np.uint16), minlength=len(counts))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


if __name__ == "__main__":
    exit.end_with(lambda arguments: main())
