"""The doctor's questions. Each answers with what is there, or with what its absence costs."""

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from pretrain.flops import device_of

ROOT = Path(__file__).parents[2]
_WRITE_BYTES = 128 * 2**20
_SELFTEST_SECONDS = 120
# Libraries on a file system that many nodes read at once take minutes.
_IMPORT_SECONDS = 600
_NEEDED = ("torch", "megatron-core", "emerging-optimizers", "pydantic", "pyyaml", "numpy")
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's screen."""

    name: str
    state: Literal["ok", "missing", "bad"]  # missing: something works less well; bad: does not work
    detail: str
    remedy: str = ""


def python() -> Finding:
    """Whether megatron-core has wheels for this interpreter."""
    version = sys.version.split()[0]
    if (3, 12) <= sys.version_info[:2] <= (3, 13):
        return Finding("Python", "ok", version)
    return Finding("Python", "bad", f"{version} is not supported", "use 3.12 or 3.13: make setup")


def packages() -> list[Finding]:
    """Whether what is needed has the pinned version; other pairs are untested."""
    tested = pins(ROOT / "requirements.txt")
    findings = []
    for name in _NEEDED:
        installed, pinned = version_of(name), tested.get(name)
        if installed is None:
            finding = Finding(name, "bad", "is not installed", "make setup")
        elif pinned and installed.split("+")[0] != pinned:
            detail = f"{installed}, tested with {pinned}: they may not fit together"
            finding = Finding(name, "bad", detail, f"pip install {name}=={pinned}")
        else:
            finding = Finding(name, "ok", installed)
        findings.append(finding)
    return findings


def gpus() -> list[Finding]:
    """The GPUs that torch sees, with memory and peak, and CUDA and NCCL."""
    findings = [
        Finding("CUDA", "ok", str(torch.version.cuda)),
        Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version()))),
    ]
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        free, total = torch.cuda.mem_get_info(index)
        device = device_of(name)
        peak = f", {device.bf16_flops / 1e12:.0f} TFLOP/s dense BF16" if device else ""
        detail = f"{name}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free{peak}"
        if free < 0.9 * total:
            remedy = "another process holds memory: nvidia-smi shows which"
            findings.append(Finding(f"GPU {index}", "bad", detail, remedy))
        elif device is None:
            remedy = "its peak is unknown, so no MFU is shown: add it to pretrain/flops.py"
            findings.append(Finding(f"GPU {index}", "missing", detail, remedy))
        else:
            findings.append(Finding(f"GPU {index}", "ok", detail))
    return findings


def machine() -> Finding:
    """Cores and main memory."""
    memory = psutil.virtual_memory()
    detail = (
        f"{len(os.sched_getaffinity(0))} cores, {memory.available / _GIB:.0f} of "
        f"{memory.total / _GIB:.0f} GiB free"
    )
    return Finding("processor", "ok", detail)


def disk(folder: Path) -> Finding:
    """Free space of a folder, and the speed at which it takes a file for good."""
    name = f"disk at {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = psutil.disk_usage(str(folder)).free
        if free < 2 * _WRITE_BYTES:
            return Finding(name, "bad", "is full", "free some space, or choose another run.dir")
        seconds = _write_seconds(folder / f".doctor-{os.getpid()}")
    except OSError as error:
        return Finding(name, "bad", f"{error.strerror}", "choose another run.dir")
    speed = _WRITE_BYTES / seconds / 1e9
    return Finding(name, "ok", f"{free / 1e9:,.0f} GB free, writes {speed:.2f} GB/s with fsync")


def imports() -> Finding:
    """Seconds until a fresh process has imported what training needs."""
    started = time.perf_counter()
    error = python_says("from pretrain import session")
    seconds = time.perf_counter() - started
    if error:
        return Finding("import", "bad", error, "make setup")
    return Finding("import", "ok", f"{seconds:.1f} s for torch, megatron-core and the program")


def ranks() -> Finding:
    """Local ranks add up a tensor: whether the library between them works, and how fast."""
    count = max(2, torch.cuda.device_count())
    library = "NCCL" if torch.cuda.is_available() else "gloo"
    if torch.cuda.device_count() == 1:
        count = 1
    name = f"{library}, {count} local rank{'s' if count > 1 else ''}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # gloo would look the machine's own name up, which need not resolve.
    variables |= {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    processes = [
        _start("-m", "launch.doctor.selftest", **variables, RANK=rank, LOCAL_RANK=rank)
        for rank in range(count)
    ]
    try:
        deadline = time.monotonic() + _SELFTEST_SECONDS
        outputs = [p.communicate(timeout=max(0.1, deadline - time.monotonic())) for p in processes]
    except subprocess.TimeoutExpired:
        return Finding(
            name, "bad", f"no result within {_SELFTEST_SECONDS} s", "see NCCL_DEBUG=INFO"
        )
    finally:
        for process in processes:
            process.kill()
    failed = [
        errors.strip().splitlines()[-1:] or ["no message"]
        for process, (_, errors) in zip(processes, outputs, strict=True)
        if process.returncode
    ]
    if failed:
        return Finding(name, "bad", failed[0][0], "see NCCL_DEBUG=INFO")
    return Finding(name, "ok", f"all-reduce passes {float(outputs[0][0]) / 1e9:.2f} GB/s a rank")


def _write_seconds(path: Path) -> float:
    block = os.urandom(2**20)
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(_WRITE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - started
    finally:
        path.unlink(missing_ok=True)


def python_says(code: str) -> str:
    """The last line of the error that a fresh interpreter ends with; "" if it ends well."""
    command = [sys.executable, "-c", code]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=_IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"has not ended within {_IMPORT_SECONDS} s"
    if not result.returncode:
        return ""
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    return lines[-1]


def _start(*arguments: str, **variables: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pins(path: Path) -> dict[str, str]:
    """Exact pins of a requirements file, by name in lower case; empty where there is no file."""
    if not path.is_file():
        return {}
    found = re.findall(r"^([\w.-]+)(?:\[.*?\])?==([\w.]+)", path.read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}
