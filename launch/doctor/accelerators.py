"""Libraries that make a GPU faster: whether they are there, whole, and built for this torch."""

import importlib.util
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

from launch.doctor.checks import ROOT, Finding, pins, python_says, version_of

_TE_PARTS = ("transformer-engine", "transformer-engine-torch")
_TE_CORES = ("transformer-engine-cu12", "transformer-engine-cu13")
_TE_COMMAND = "pip install --no-build-isolation -r requirements-gpu.txt"
_APEX_SOURCE = "build it with --cpp_ext --cuda_ext from github.com/NVIDIA/apex"
_APEX_NAMESAKE = "the package index's apex is another project"


def transformer_engine() -> Finding:
    """Whether Transformer Engine is there, of one version and torch's CUDA, and can be imported."""
    name = "Transformer Engine"
    version = version_of(_TE_PARTS[0])
    if version is None:
        lost = (
            "no model.implementation=transformer_engine, so no FP8 but emulated, and no context "
            f"parallelism; {_TE_COMMAND}"
        )
        return Finding(name, "missing", "is not installed", lost)
    cores = [core for core in _TE_CORES if version_of(core)]
    found = {part: version_of(part) for part in (*_TE_PARTS, *cores)}
    if len(cores) != 1 or set(found.values()) != {version}:
        parts = ", ".join(f"{part} {number or 'missing'}" for part, number in found.items())
        detail = f"its parts do not fit together: {parts}"
        return Finding(name, "bad", detail, _TE_COMMAND)
    cuda = (torch.version.cuda or "none").split(".")[0]
    if cores[0] != f"transformer-engine-cu{cuda}":
        detail = f"{cores[0]} is installed, and torch's CUDA is {torch.version.cuda}"
        return Finding(name, "bad", detail, "install both for the same CUDA")
    tested = pins(ROOT / "requirements-gpu.txt").get(_TE_PARTS[0])
    if tested and version != tested:
        detail = f"{version}, tested with {tested}: it may not fit"
        return Finding(name, "bad", detail, _TE_COMMAND)
    error = python_says("import transformer_engine.pytorch")
    if error:
        return Finding(name, "bad", f"{version} cannot be imported: {error}", _TE_COMMAND)
    return Finding(name, "ok", version)


def apex() -> Finding:
    """Whether NVIDIA's apex is there with its extensions, and not the package of the same name."""
    spec = importlib.util.find_spec("apex")
    if spec is None and version_of("apex") is None:
        lost = f"no train.fused_gradients; {_APEX_SOURCE}, as {_APEX_NAMESAKE}"
        return Finding("apex", "missing", "is not installed", lost)
    if spec is None or not _is_nvidias(spec):
        remedy = f"pip uninstall apex: {_APEX_NAMESAKE}; {_APEX_SOURCE}"
        return Finding("apex", "bad", "what is installed is not NVIDIA's", remedy)
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        lost = f"no train.fused_gradients; {_APEX_SOURCE}"
        return Finding("apex", "missing", "NVIDIA's, built without its extensions", lost)
    return Finding("apex", "ok", "NVIDIA's")


def _is_nvidias(spec: ModuleSpec) -> bool:
    """Told by its folders: importing a stranger would run it."""
    return any(
        (Path(root) / "optimizers").is_dir() for root in spec.submodule_search_locations or ()
    )


def no_gpu() -> Finding:
    """Why torch sees no GPU, where a driver says that there is one and where there is none."""
    built = torch.version.cuda
    detail = f"torch is built for CUDA {built}" if built else "torch is CPU-only"
    lost = "training runs on the processor, slowly"
    if shutil.which("nvidia-smi") is None:
        how = "a machine with an NVIDIA GPU and its driver" + (
            "" if built else ", and torch for it"
        )
        return Finding("GPU", "missing", f"none; {detail}", f"{lost}; what helps: {how}")
    how = "nvidia-smi shows the GPUs, and the newest CUDA that its driver can"
    if not built:
        how = "install a torch that is built for CUDA"
    return Finding(
        "GPU", "bad", f"its driver is there, but {detail} and sees none", f"{lost}; {how}"
    )


def ray() -> Finding:
    """Whether text can be tokenised on several machines."""
    version = version_of("ray")
    if version is None:
        lost = "data_prep works on one machine at a time, no --executor ray; pip install ray"
        return Finding("Ray", "missing", "is not installed", lost)
    return Finding("Ray", "ok", version)
