"""Lets megatron-core 0.19.2 run on a machine without CUDA: gloo and tensors in main memory.

Megatron-core asks for "the CUDA device" in many places even when nothing is computed there. One
explicit call, `prepare()`, answers these questions with the CPU. It changes torch for the whole
process, does nothing where CUDA is there, and may be called again.

Covered: tensor, sequence, pipeline and expert parallelism, DDP with the distributed optimizer's
buffers, recomputation, dist_checkpointing (synchronous, plain load) and GPTDataset. Megatron's own
optimizers, timers and rerun machine are not: this project does not use them.
"""

import functools
import warnings

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


def prepare() -> None:
    """Make megatron-core run on the CPU. No-op with CUDA, and when called again.

    Call it after `import torch` and before the first process group or model is built.
    """
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return
    _patch_torch()
    _patch_random_state()
    _patch_dispatcher()


def _patch_torch() -> None:
    # `with torch.device(...)` recognises factories by a set that it builds once, at first use; it
    # has to hold the real ones.
    _device_constructors()
    # All schedules count tokens in torch.zeros(…, device="cuda"). Wrapping the factory is cheaper
    # than a function mode, and holds in every thread.
    torch.zeros = _on_cpu(torch.zeros)
    # Every buffer of the parallel layers, of DDP and of point-to-point receives, and the rotary
    # frequencies at the first forward pass, are put on the current device.
    torch.cuda.current_device = _current_device
    # The schedules, dist_checkpointing and group creation wait for kernels that do not exist.
    torch.cuda.synchronize = _nothing
    # DDP takes the current stream in every gradient reduction, but only waits on it for events of
    # CUDA graphs, which do not exist.
    torch.cuda.current_stream = _nothing
    # Tied embeddings move their weight to the device when pp > 1.
    torch.Tensor.cuda = _same_tensor
    # Core compiles small functions, such as the gate of gated attention, for their first call: that
    # takes seconds in each process and a C++ compiler, and trips over the replacements above.
    torch.compiler.set_stance("force_eager")


def _patch_random_state() -> None:
    """Let core's tracker of random states follow the CPU generator.

    The tracker forks in sequence-parallel embeddings and in recomputation; without CUDA its first
    question for a state raises.
    """
    with warnings.catch_warnings():
        # Core warns once per module that Transformer Engine and Apex are not installed.
        warnings.simplefilter("ignore", UserWarning)
        import megatron.core.tensor_parallel.random as core_random

    torch.cuda.manual_seed = _manual_seed
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.random.get_rng_state = _get_rng_state
    core_random._set_cuda_rng_state = _set_rng_state


def _patch_dispatcher() -> None:
    """Let core's all-to-all of experts' tokens find its counts here, where they are already.

    From a GPU it copies them on a stream of its own, which it makes if there is none yet.
    """
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _IdleStream()
    token_dispatcher.maybe_move_tensor_to_cpu = _counts


def _on_cpu(factory):
    @functools.wraps(factory)
    def create(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _current_device() -> torch.device:
    return _CPU


def _nothing(*args, **kwargs) -> None:
    return None


def _counts(counts, as_numpy: bool = False, record_stream: bool = False):
    """Where they lie on the CPU, core leaves them tensors, which torch's all-to-all refuses."""
    return counts.numpy() if as_numpy and torch.is_tensor(counts) else counts


class _IdleStream:
    """A stream, and an event on it, where nothing runs later than it is called."""

    wait_stream = synchronize = _nothing

    def record_event(self) -> "_IdleStream":
        return self


def _same_tensor(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    return tensor


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _get_rng_state(device=None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)
