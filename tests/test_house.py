"""The rules of the house: who may import whom, how long things may be, what an import may do."""

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "launch": {"launch", "pretrain", "megatron_ext"},
    "pretrain": {"pretrain", "megatron_ext"},
    "megatron_ext": {"megatron_ext"},
    "data_prep": {"data_prep"},
}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 7
# Exceptions; this list may only shrink.
ALLOWED: set[str] = set()


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of everything imported, also inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    others = {*ROOMS, "tests", "benchmarks"} - ROOMS[room]
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path, tree in sources(room)
        for name in imported(tree)
        if name in others
    }
    assert wrong == set()


# Imported only where a user asks for them, and refused by name where they are not installed.
OPTIONAL = {"ray", "gigatoken"}


def test_data_prep_knows_nothing_of_torch():
    names = {name for _, tree in sources("data_prep") for name in imported(tree)}
    assert names & {"torch", "megatron", "emerging_optimizers"} == set()


def test_files_and_functions_stay_small():
    too_large = set()
    for path, tree in sources(*ROOMS, "tests", "benchmarks"):
        name = str(path.relative_to(ROOT))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            too_large.add(f"{name}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_large.add(f"{name} {node.name}: {length} lines")
                arguments = node.args
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                count = len([a for a in named if a.arg not in ("self", "cls")])
                if count > MAX_PARAMETERS and not node.name.startswith("test_"):
                    too_large.add(f"{name} {node.name}: {count} parameters")
    assert too_large - ALLOWED == set()
    assert ALLOWED - too_large == set(), "no longer needed: take them off the list"


def test_every_library_that_is_imported_is_pinned():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_normal(line.split("==")[0]) for line in lines if "==" in line}
    distributions = importlib.metadata.packages_distributions()
    own = {*ROOMS, "tests", "benchmarks"} | OPTIONAL
    missing = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path, tree in sources(*ROOMS, "tests")
        for name in imported(tree) - own - sys.stdlib_module_names
        if not pinned & {_normal(found) for found in distributions.get(name, [])}
    }
    assert missing == set()


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


IMPORT_ALL = """
import importlib, os, pkgutil, signal, sys, threading
handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
for room in sys.argv[1:]:
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
assert handlers == {number: signal.getsignal(number) for number in handlers}, "signal handlers"
assert threading.active_count() == 1, threading.enumerate()
if "torch" in sys.modules:
    import torch
    assert not torch.distributed.is_initialized(), "a process group"
    assert not torch.cuda.is_initialized(), "CUDA"
    assert len(os.listdir("/proc/self/task")) == 1, "threads, which a fork into ranks would lose"
    assert torch.cuda.current_device.__module__ == "torch.cuda", "patches for the CPU"
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("rooms", "needs_torch"),
    [(["data_prep"], "False"), (["megatron_ext", "pretrain", "launch"], "True")],
)
def test_importing_everything_starts_nothing(rooms, needs_torch):
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *rooms],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [needs_torch]
