"""What only a GPU can show, in under ten minutes on one: `pytest tests/gpu -s`.

Prints and writes to gpu.json, in the folder that $OUT names or the current one, the speeds that it
measured, with the date and the device.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pretrain.run_folder import RunFolder
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=4000)


@pytest.fixture(scope="module")
def figures():
    """Filled by the tests, written at the end."""
    found = {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name()}
    yield found
    text = json.dumps(found, indent=1)
    print(text)
    (Path(os.environ.get("OUT", ".")) / "gpu.json").write_text(text + "\n")


def train(recipe: str, run: Path, blend: Path, on_gpu: bool = True, **options) -> RunFolder:
    """`launch local` in a process of its own, as a user would; a fork would lose CUDA."""
    values = {"data.blend": blend, "run.dir": run, "validation.every": 0}
    values |= {key.replace("__", "."): value for key, value in options.items()}
    command = [sys.executable, "-m", "launch", "local", recipe]
    command += [f"{key}={value}" for key, value in values.items()]
    environment = os.environ | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return RunFolder(run)


def losses(run: RunFolder) -> list[float]:
    return [record["loss"] for record in run.records("metrics")]


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_training_on_the_gpu_is_that_on_the_processor(blend, tmp_path, name):
    options = {key.replace(".", "__"): value for key, value in SMALL.items()}
    options |= {"optimizer__name": name, "optimizer__arithmetic": "fp32", "train__steps": 8}
    gpu = losses(train("demo", tmp_path / "gpu", blend, **options))
    cpu = losses(train("demo", tmp_path / "cpu", blend, on_gpu=False, **options))
    assert gpu == pytest.approx(cpu, rel=1e-3)


def test_stopped_and_resumed_run_is_the_straight_one(blend, tmp_path):
    options = {"train__precision": "bf16", "train__steps": 8, "outer__interval": 4}
    straight = losses(train("demo", tmp_path / "straight", blend, **options))
    train("demo", tmp_path / "stopped", blend, train__stop_at=5, **options)
    assert losses(train("demo", tmp_path / "stopped", blend, **options)) == straight


def test_verify_optimizer_passes_on_the_gpu(blend, tmp_path):
    command = [sys.executable, "-m", "launch", "local", "verify-optimizer", "150m"]
    command += [f"data.blend={blend}", f"run.dir={tmp_path}", "parallel.replicas=1"]
    command += ["optimizer.syrk=true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_two_replicas_on_one_device_exchange_over_nccl(blend, tmp_path):
    """NCCL may refuse to have two processes on one device; then it is skipped with its words."""
    options = {"run.dir": tmp_path, "data.blend": blend, "parallel.replicas": 2, "train.steps": 8}
    options |= {"outer.interval": 4, "outer.codec": "linear", "outer.bits": 4}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["tests/gpu/one_device.py", "demo"]
    command += [f"{key}={value}" for key, value in options.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and "Duplicate GPU" in done.stdout + done.stderr:
        pytest.skip("NCCL: Duplicate GPU detected")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rounds = RunFolder(tmp_path).records("rounds")
    assert [record["bytes_sent"] for record in rounds] == [r["bytes_planned"] for r in rounds]


FP8 = pytest.param(
    "+fp8",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="Transformer Engine is not installed",
    ),
)


@pytest.mark.parametrize("method", ["", FP8])
@pytest.mark.parametrize("recipe", ["416m", "1.76b"])
def test_speed_of_the_zoo(blend, tmp_path, figures, recipe, method):
    options = {"parallel__replicas": 1, "parallel__tp": 1, "parallel__sequence_parallel": "false"}
    options |= {"outer__interval": 0, "train__steps": 10, "train__global_batch": 32}
    options |= {"train__micro_batch": 4, "optimizer__warmup_steps": 2, "checkpoint__every": 0}
    options |= {"train__recompute": "selective"}
    records = train(recipe + method, tmp_path, blend, **options).records("metrics")[4:]
    figures[recipe + method] = {
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in records),
        "mfu": statistics.median(r["mfu"] for r in records),
        "step_seconds": [round(r["seconds"], 3) for r in records],
    }
    assert all(0 < record["mfu"] <= 1 for record in records)
