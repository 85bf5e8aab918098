"""Speed and memory of `data_prep tokenize` beside a bare loop and datatrove's Megatron pipeline.

    .venv/bin/python benchmarks/tokenize.py [--megabytes 64] [--datatrove-python PATH]

All run on the same text and vocabulary, one after the other, with one and with two processes:

- bare: each process parses the JSON lines of its own files and calls the tokenizer library; nothing
  is written. So many loops side by side are the limit that any pipeline has.
- ours: `python -m data_prep tokenize`; fast: with `--backend gigatoken`, where it is installed.
- datatrove: JsonlReader and MegatronDocumentTokenizer, if an interpreter that has it is named; the
  SentencePiece vocabulary is given to it as the equal `tokenizer.json`.

Threads inside the libraries are pinned to one per process. Seconds include starting up.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--datatrove-python", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=default_tokenizer())
    parser.add_argument("--only", help="run just one of these, as in ours-2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_text(folder / "in", args.megabytes * 10**6, args.files)
        hf_path = folder / "tokenizer.json"
        hf_path.write_text(json.dumps(as_tokenizer_json(args.tokenizer)))
        print(f"{size / 1e6:.0f} MB of text in {args.files} zstd files, {args.tokenizer.name}")
        print(f"{'':12} {'seconds':>8} {'CPU s':>8} {'MB/s':>7} {'peak MB':>8}")
        taken = {}
        for name, commands in runs(args, folder, hf_path).items():
            if args.only in (None, name):
                taken[name] = measure(name, commands, size)
        compare(taken)


def default_tokenizer() -> Path | None:
    spec = importlib.util.find_spec("mistral_common")
    return Path(spec.origin).parent / "data" / "tokenizer.model.v1" if spec else None


def write_text(folder: Path, wanted: int, files: int) -> int:
    """Real documents, joined to Nemotron-CC's length and repeated to `wanted` bytes."""
    sample = folder.parent / "sample"
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


def runs(args: argparse.Namespace, folder: Path, hf_path: Path) -> dict[str, list[list]]:
    """Commands by name; those of one name run side by side."""
    paths = sorted((folder / "in").iterdir())
    found: dict[str, list[list]] = {}
    for workers in (1, 2):
        bare = [sys.executable, "-c", BARE, args.tokenizer]
        found[f"bare-{workers}"] = [[*bare, *paths[i::workers]] for i in range(workers)]
        found[f"ours-{workers}"] = [
            [
                sys.executable, "-m", "data_prep", "tokenize", folder / "in",
                "--tokenizer", args.tokenizer, "--output", folder / f"ours-{workers}",
                "--workers", workers,
            ]
        ]  # fmt: skip
        if importlib.util.find_spec("gigatoken"):
            ours = found[f"ours-{workers}"][0]
            fast = [*ours, "--backend", "gigatoken"]
            fast[fast.index("--output") + 1] = folder / f"fast-{workers}"
            found[f"fast-{workers}"] = [fast]
        if args.datatrove_python:
            script = folder / "datatrove_run.py"
            script.write_text(DATATROVE)
            out = folder / f"datatrove-{workers}"
            found[f"datatrove-{workers}"] = [
                [args.datatrove_python, script, folder / "in", hf_path, out, workers]
            ]
    return found


class Taken(NamedTuple):
    """Seconds of one run."""

    wall: float
    cpu: float


def measure(name: str, commands: list[list], size: int) -> Taken:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    running = [
        subprocess.Popen(
            [str(part) for part in command],
            cwd=REPOSITORY,
            env={**os.environ, **PINNED},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for command in commands
    ]
    peak = watch(running)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{name:12} {wall:8.1f} {cpu:8.1f} {size / 1e6 / wall:7.2f} {peak / 1e6:8.0f}", flush=True
    )
    return Taken(wall, cpu)


def watch(running: list[subprocess.Popen]) -> int:
    """Wait for all; the highest resident memory of any process below them, in bytes."""
    import psutil

    peak = 0
    while any(process.poll() is None for process in running):
        for process in running:
            try:
                parent = psutil.Process(process.pid)
                family = [parent, *parent.children(recursive=True)]
                peak = max(peak, *(member.memory_info().rss for member in family))
            except psutil.Error:
                continue
        time.sleep(0.05)
    for process in running:
        if process.returncode:
            raise SystemExit(process.stderr.read().decode()[-2000:])
    return peak


def compare(taken: dict[str, Taken]) -> None:
    def ratio(label: str, slow: str, fast: str, goal: str) -> None:
        if slow in taken and fast in taken:
            wall = taken[slow].wall / taken[fast].wall
            cpu = taken[slow].cpu / taken[fast].cpu
            print(f"{label}: {wall:.2f} by wall, {cpu:.2f} by CPU seconds (goal {goal})")

    ratio("ours against the bare loop, 1 process", "bare-1", "ours-1", ">= 0.9")
    ratio("ours against bare loops, 2 processes", "bare-2", "ours-2", ">= 0.9")
    ratio("ours against datatrove, 1 process", "datatrove-1", "ours-1", ">= 1.4")
    ratio("fast back end against datatrove, 1 process", "datatrove-1", "fast-1", ">= 3")
    for slow, fast, goal in [
        ("ours-1", "ours-2", 1.8),
        ("datatrove-2", "ours-2", 1.4),
        ("datatrove-2", "fast-2", 3),
    ]:
        if slow in taken and fast in taken:  # CPU seconds of datatrove's own children are not seen
            print(f"{fast} against {slow}: {taken[slow].wall / taken[fast].wall:.2f} (goal {goal})")


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
