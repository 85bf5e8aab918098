"""A small real corpus in Nemotron-CC's layout, from documentation that lies on every machine.

Sources: `pydoc_data.topics`, and the docstrings of the standard library, numpy and torch, read from
their source files without importing them.
"""

import ast
import importlib.util
import json
import shutil
import sysconfig
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import zstandard

from data_prep.errors import UsageError
from data_prep.progress import Reporter

MIN_CHARACTERS = 200
_FRAME_RECORDS = 256  # several zstd frames a file, as large writers leave them
_FILES = 2
_PARTITIONS = {
    "topics": "quality=high/kind=actual/kind2=actual",
    "stdlib": "quality=medium-high/kind=actual/kind2=actual",
    "numpy": "quality=medium/kind=actual/kind2=actual",
    "torch": "quality=medium-low/kind=actual/kind2=actual",
    "lists": "quality=high/kind=synthetic/kind2=knowledge_list",
}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def write_sample(out: Path, reporter: Reporter) -> dict[str, int]:
    """Write `out/data-jsonl/quality=…/kind=…/kind2=…/*.jsonl.zstd`.

    The same installation gives the same files. Returns the documents of each partition.
    """
    root = out / "data-jsonl"
    if root.exists():
        raise UsageError(f"{root}: is there already; choose another folder or delete it")
    seen: set[str] = set()
    texts: dict[str, list[tuple[str, str]]] = {name: [] for name in _PARTITIONS}
    for source, url, text in _harvest(reporter):
        if len(text) > MIN_CHARACTERS and text not in seen:
            seen.add(text)
            texts[source].append((url, text))
    fresh = out / f".{root.name}.tmp"  # half of it must not pass for the whole
    shutil.rmtree(fresh, ignore_errors=True)
    for source, partition in _PARTITIONS.items():
        folder = fresh / partition
        folder.mkdir(parents=True)
        for number in range(_FILES):
            _write(folder / f"part-{number:05d}.jsonl.zstd", texts[source][number::_FILES])
    fresh.rename(root)
    return {_PARTITIONS[source]: len(found) for source, found in texts.items()}


def _write(path: Path, documents: list[tuple[str, str]]) -> None:
    compressor = zstandard.ZstdCompressor(level=3)
    with path.open("wb") as file:
        for first in range(0, len(documents), _FRAME_RECORDS):
            rows = [
                json.dumps(
                    {
                        "text": text,
                        "language": "eng",
                        "warc_record_id": str(uuid.uuid5(uuid.NAMESPACE_URL, url)),
                        "url": url,
                    },
                    ensure_ascii=False,
                )
                for url, text in documents[first : first + _FRAME_RECORDS]
            ]
            file.write(compressor.compress("".join(f"{row}\n" for row in rows).encode()))


def _harvest(reporter: Reporter) -> Iterator[tuple[str, str, str]]:
    """`(source, url, text)` of everything found, in a fixed order."""
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield "topics", f"https://docs.python.org/3/topics/{name}", text.strip()
    modules = [(source, base, path) for source, base in _roots() for path in _modules(base)]
    reporter.phase("harvest documentation", sum(path.stat().st_size for *_, path in modules))
    for source, base, path in modules:
        reporter.advance(path.stat().st_size)
        module = path.relative_to(base.parent if source != "stdlib" else base)
        name = ".".join(module.with_suffix("").parts)
        docs = list(_docstrings(path, name))
        yield from ((source, f"pydoc://{where}", text) for where, text in docs)
        if len(docs) > 1:
            lines = "\n".join(f"- {where}: {text.split(chr(10))[0]}" for where, text in docs)
            yield "lists", f"pydoc://{name}#contents", f"Contents of {name}:\n{lines}"


def _roots() -> Iterator[tuple[str, Path]]:
    yield "stdlib", Path(sysconfig.get_path("stdlib"))
    for package in ("numpy", "torch"):
        if spec := importlib.util.find_spec(package):
            yield package, Path(spec.origin).parent


def _modules(base: Path) -> list[Path]:
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "testing", "_vendor"}
    return sorted(
        path for path in base.rglob("*.py") if not skipped & set(path.relative_to(base).parts)
    )


def _docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    source = path.read_bytes()
    if b'"""' not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # some packages ship templates and sources for other Python versions
    yield from _of_node(tree, module)


def _of_node(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if text := ast.get_docstring(node):
        yield name, text
    for child in getattr(node, "body", []):
        if isinstance(child, _DOCUMENTED):
            yield from _of_node(child, f"{name}.{child.name}")
