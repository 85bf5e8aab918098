"""Accelerators that are missing, half there, built for something else, or somebody else's."""

from pathlib import Path

import pytest
import torch

from launch.doctor import accelerators

PINNED = accelerators.pins(accelerators.ROOT / "requirements-gpu.txt")["transformer-engine"]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts distributions and modules on the path, as an installer would."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def add(distributions: dict[str, str], modules: dict[str, str] | None = None) -> Path:
        for name, version in distributions.items():
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n")
            with (folder / "METADATA").open("a") as file:
                file.write(f"Version: {version}\n")
        for path, text in (modules or {}).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return add


def te(core: str = "cu13", version: str = PINNED, of_torch: str = "") -> dict[str, str]:
    return {
        "transformer-engine": version,
        f"transformer-engine-{core}": version,
        "transformer-engine-torch": of_torch or version,
    }


def test_transformer_engine_that_is_missing_says_what_is_lost_and_how_to_get_it():
    found = accelerators.transformer_engine()
    assert found.state == "missing"
    assert "no FP8 but emulated" in found.remedy and "requirements-gpu.txt" in found.remedy


@pytest.mark.parametrize(
    ("distributions", "cuda", "message"),
    [
        (te(of_torch="2.19.0"), "13.0", "its parts do not fit together"),
        ({"transformer-engine": PINNED}, "13.0", "transformer-engine-torch missing"),
        (te("cu12"), "13.0", "transformer-engine-cu12 is installed, and torch's CUDA is 13.0"),
        (te(), None, "torch's CUDA is None"),
        (te(version="2.1"), "13.0", f"2.1, tested with {PINNED}"),
        (te(), "13.0", "cannot be imported: ImportError: no libcuda"),
    ],
)
def test_transformer_engine_that_cannot_work_is_told(
    distributions, cuda, message, install, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    broken = "raise ImportError('no libcuda')"
    install(distributions, {"transformer_engine/pytorch.py": broken})
    found = accelerators.transformer_engine()
    assert found.state == "bad"
    assert message in found.detail
    assert found.remedy


def test_transformer_engine_that_fits_is_ok(install, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    install(te(), {"transformer_engine/pytorch.py": ""})
    assert accelerators.transformer_engine().state == "ok"


def test_missing_apex_warns_of_the_package_of_that_name():
    found = accelerators.apex()
    assert found.state == "missing"
    assert "another project" in found.remedy and "github.com/NVIDIA/apex" in found.remedy


@pytest.mark.parametrize(
    ("modules", "state", "detail"),
    [
        ({"apex.py": ""}, "bad", "not NVIDIA's"),
        # Importing it would run it.
        ({"apex/__init__.py": "raise SystemExit('ran')"}, "bad", "not NVIDIA's"),
        ({"unrelated.py": ""}, "bad", "not NVIDIA's"),
        ({"apex/optimizers/__init__.py": ""}, "missing", "built without its extensions"),
        (
            {"apex/optimizers/__init__.py": "", "fused_weight_gradient_mlp_cuda.py": ""},
            "ok",
            "NVIDIA's",
        ),
    ],
)
def test_apex_is_told_from_the_package_of_the_same_name(modules, state, detail, install):
    install({"apex": "0.9.8"}, modules)
    found = accelerators.apex()
    assert found.state == state
    assert detail in found.detail


def test_driver_without_a_torch_that_uses_it_is_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = accelerators.no_gpu()
    assert (found.state, found.detail) == ("missing", "none; torch is CPU-only")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert accelerators.no_gpu().state == "bad"
    assert "install a torch that is built for CUDA" in accelerators.no_gpu().remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "newest CUDA that its driver can" in accelerators.no_gpu().remedy
