"""Speed and memory of `data_prep tokenize` beside a bare loop and datatrove's Megatron pipeline.

    .venv/bin/python benchmarks/tokenize.py [--datatrove-python PATH]     # about 5 minutes, idle

All run on the same text and vocabulary, one after the other and in another order each time, with
one and with two processes:

- bare: each process parses the JSON lines of its own files and calls the tokenizer library; nothing
  is written. So many loops side by side are the limit that any pipeline has.
- ours: `python -m data_prep tokenize`; fast: with `--backend gigatoken`, where it is installed.
- datatrove: JsonlReader and MegatronDocumentTokenizer, if an interpreter that has it is named; the
  SentencePiece vocabulary is given to it as the equal `tokenizer.json`.

Threads inside the libraries are pinned to one per process. Seconds include starting up. CPU seconds
are those of all processes of a run; ratios are of runs in the same repeat, as median [lowest,
highest]. Last comes one large file, for the memory of a worker.
"""

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import zstandard
from sentencepiece import sentencepiece_model_pb2

REPOSITORY = Path(__file__).parents[1]
RECORD_CHARACTERS = 3400  # Nemotron-CC's records are of 2.5 to 4.2 KB
PINNED = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

BARE = """
import io, json, sys
import sentencepiece, zstandard
model = sentencepiece.SentencePieceProcessor(model_file=sys.argv[1])
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        for line in io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file), 1 << 20):
            model.encode(json.loads(line)["text"])
"""

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer
folder, tokenizer, out, workers = sys.argv[1:]
if __name__ == "__main__":
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(folder, compression="zstd", glob_pattern="*.jsonl.zst"),
            MegatronDocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="</s>"),
        ],
        tasks=4, workers=int(workers), logging_dir=out + "-logs",
    ).run()
"""


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        size = write_text(folder / "in", args.megabytes * 10**6, args.files)
        (folder / "tokenizer.json").write_text(json.dumps(as_tokenizer_json(args.tokenizer)))
        print(f"{size / 1e6:.0f} MB of text in {args.files} zstd files, {args.tokenizer.name}")
        print(f"{'':14} {'seconds':>8} {'CPU s':>8} {'MB/s':>7} {'peak MB':>8}")
        runs = commands(args, folder)
        names = [name for name in runs if args.only in (None, name)]
        repeats = []
        for repeat in range(args.repeats):
            order = names[repeat % len(names) :] + names[: repeat % len(names)]
            repeats.append({name: measure(name, runs[name], size, folder) for name in order})
        for line in comparisons(repeats):
            print(line)
        if args.large_megabytes and args.only is None:
            shutil.rmtree(folder / "in")
            size = write_text(folder / "in", args.large_megabytes * 10**6, 1)
            print(f"one file of {size / 1e6:.0f} MB, two workers (goal: under 500 MB each)")
            name = "fast-2" if "fast-2" in runs else "ours-2"
            measure(name, runs[name], size, folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64, help="of text (default: 64)")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--large-megabytes", type=int, default=1000, help="of the last run's file; 0: leave it out"
    )
    parser.add_argument("--datatrove-python", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=default_tokenizer())
    parser.add_argument("--scratch", type=Path, help="folder for text and outputs")
    parser.add_argument("--only", help="run just one of these, as in ours-2")
    return parser.parse_args()


def default_tokenizer() -> Path | None:
    spec = importlib.util.find_spec("mistral_common")
    return Path(spec.origin).parent / "data" / "tokenizer.model.v1" if spec else None


def write_text(folder: Path, wanted: int, files: int) -> int:
    """Real documents, joined to Nemotron-CC's length and repeated to `wanted` bytes."""
    sample = folder.parent / "sample"
    if not sample.exists():
        subprocess.run(
            [sys.executable, "-m", "data_prep", "sample", sample],
            check=True, cwd=REPOSITORY, capture_output=True,
        )  # fmt: skip
    texts, held = [], ""
    for path in sorted(sample.rglob("*.zstd")):
        raw = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
        for line in raw.read().split(b"\n")[:-1]:
            held += json.loads(line)["text"] + "\n\n"
            if len(held) >= RECORD_CHARACTERS:
                texts.append(held[: 2 * RECORD_CHARACTERS])
                held = ""
    folder.mkdir()
    size = 0
    for number in range(files):
        with zstandard.open(folder / f"{number}.jsonl.zst", "wb") as file:
            written = 0
            while written < wanted / files:
                for text in texts[number::files]:
                    line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
                    written += file.write(line)
                    if written >= wanted / files:
                        break
        size += written
    return size


def commands(args: argparse.Namespace, folder: Path) -> dict[str, list[list]]:
    """Commands by name; those of one name run side by side. They write below `folder/out`."""
    given, out = folder / "in", folder / "out"
    paths = sorted(given.iterdir())
    found: dict[str, list[list]] = {}
    for workers in (1, 2):
        bare = [sys.executable, "-c", BARE, args.tokenizer]
        found[f"bare-{workers}"] = [[*bare, *paths[i::workers]] for i in range(workers)]
        ours = [
            sys.executable, "-m", "data_prep", "tokenize", given, "--tokenizer", args.tokenizer,
            "--output", out / "tokens", "--workers", workers,
        ]  # fmt: skip
        found[f"ours-{workers}"] = [ours]
        if importlib.util.find_spec("gigatoken"):
            found[f"fast-{workers}"] = [[*ours, "--backend", "gigatoken"]]
        if args.datatrove_python:
            script = folder / "datatrove_run.py"
            script.write_text(DATATROVE)
            found[f"datatrove-{workers}"] = [
                [
                    args.datatrove_python,
                    script,
                    given,
                    folder / "tokenizer.json",
                    out / "d",
                    workers,
                ]
            ]
    return found


class Taken(NamedTuple):
    """Seconds of one run."""

    wall: float
    cpu: float


def measure(name: str, side_by_side: list[list], size: int, folder: Path) -> Taken:
    """Run commands side by side, print what they took, and delete what they wrote."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    began = time.perf_counter()
    with (folder / "errors").open("w+b") as errors:
        running = [
            subprocess.Popen(
                [str(part) for part in command],
                cwd=REPOSITORY,
                env={**os.environ, **PINNED},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            for command in side_by_side
        ]
        peak, cpu = watch(running)
        wall = time.perf_counter() - began
        if any(process.returncode for process in running):
            errors.seek(0)
            raise SystemExit(f"{name} failed: {errors.read().decode()[-2000:]}")
    print(
        f"{name:14} {wall:8.1f} {cpu:8.1f} {size / 1e6 / wall:7.2f} {peak / 1e6:8.0f}", flush=True
    )
    return Taken(wall, cpu)


def watch(running: list[subprocess.Popen]) -> tuple[int, float]:
    """Wait for all; the highest resident memory of one process in bytes, CPU seconds of all.

    CPU seconds are what the kernel knows of ended children, or, where a library does not wait for
    its own, what was last seen of each process.
    """
    import psutil

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = 0
    seen: dict[int, float] = {}
    while any(process.poll() is None for process in running):
        for process in running:
            try:
                parent = psutil.Process(process.pid)
                for member in (parent, *parent.children(recursive=True)):
                    peak = max(peak, member.memory_info().rss)
                    seen[member.pid] = sum(member.cpu_times()[:2])
            except psutil.Error:
                continue
        time.sleep(0.05)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    known = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return peak, max(known, sum(seen.values()))


COMPARED = [
    ("ours-1", "bare-1", 0.9),
    ("ours-2", "bare-2", 0.9),
    ("ours-2", "ours-1", 1.8),
    ("fast-2", "fast-1", None),
    ("bare-2", "bare-1", None),
    ("ours-1", "datatrove-1", 1.4),
    ("ours-2", "datatrove-2", 1.4),
    ("fast-1", "datatrove-1", 3),
    ("fast-2", "datatrove-2", 3),
]


def comparisons(repeats: list[dict[str, Taken]]) -> Iterator[str]:
    """How many times as fast one is as another: by wall, and by CPU seconds for equal workers."""
    for fast, slow, goal in COMPARED:
        if fast not in repeats[0] or slow not in repeats[0]:
            continue
        line = f"{fast} against {slow}: {spread([r[slow].wall / r[fast].wall for r in repeats])}"
        if fast[-1] == slow[-1]:
            by_cpu = spread([r[slow].cpu / r[fast].cpu for r in repeats])
            line += f" by wall, {by_cpu} by CPU seconds"
        yield line + (f" (goal >= {goal})" if goal else "")


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def as_tokenizer_json(model: Path) -> dict:
    """The same BPE vocabulary for the Hugging Face library, which has no reader for `.model`."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
    vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    assert sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes()).bos_id() == 1
    merges = sorted(
        (
            (vocab[piece], piece[:cut], piece[cut:])
            for piece in vocab
            for cut in range(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab
        ),
        key=lambda merge: (merge[0], vocab[merge[1]], vocab[merge[2]]),
    )
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": vocab[name], "content": name, "special": True, "normalized": False,
                "single_word": False, "lstrip": False, "rstrip": False,
            }
            for name in ("<unk>", "<s>", "</s>")
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": vocab, "merges": [[left, right] for _, left, right in merges],
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
