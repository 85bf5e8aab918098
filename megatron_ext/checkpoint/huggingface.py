"""The global weights as a Hugging Face model, which `transformers` loads.

With sandwich norms the model is a Gemma3ForCausalLM, whose norms multiply by one plus their weight
and whose embedding is multiplied by √hidden; without them it is a Qwen3ForCausalLM.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.saved import Saved
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.logical import logical_shapes

SHARD_BYTES = 5 * 10**9

_TOP = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_SANDWICH = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_PLAIN = {"mlp_norm": "post_attention_layernorm"}


def config_of(model: ModelConfig, dtype: torch.dtype, eod: int | None) -> dict[str, Any]:
    """Content of config.json. `eod`: the token that ends a document."""
    rope = {"rope_type": "default", "rope_theta": float(model.rope_base)}
    config = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": False,
        "layer_types": ["full_attention"] * model.layers,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": eod,
        "pad_token_id": None,
    }
    if not model.sandwich_norm:
        return config | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "rope_parameters": rope,
            "tie_word_embeddings": model.tie_head,
        }
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "silu",
        "query_pre_attn_scalar": model.head_dim,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        # The embedding is stored divided by √hidden and the head is not, so they cannot be one.
        "tie_word_embeddings": False,
    }


def weights_of(name: str, tensor: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """What a logical parameter, whole and fp32, becomes: Hugging Face name to tensor."""
    sandwich = model.sandwich_norm
    if name == "embedding" and sandwich:
        head = {_TOP["head"]: tensor} if model.tie_head else {}
        return {_TOP["embedding"]: tensor / math.sqrt(model.hidden), **head}
    return {name_of(name, model): tensor - 1 if sandwich and name.endswith("norm") else tensor}


def name_of(name: str, model: ModelConfig) -> str:
    """What Hugging Face calls a logical parameter."""
    if name in _TOP:
        return _TOP[name]
    layer, rest = re.fullmatch(r"(layers\.\d+)\.(.+)", name).groups()
    names = _LAYER | (_SANDWICH if model.sandwich_norm else _PLAIN)
    return f"model.{layer}.{names[rest]}.weight"


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `output` if all goes well, and else is removed.

    Raises ConfigError if `output` exists.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already; choose another folder to export to")
    partial = output.with_name(output.name + folders.PARTIAL)
    if partial.exists():
        folders.discard(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(output)
    except BaseException:
        folders.discard(partial)
        raise


def write(
    saved: Saved,
    model: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    eod: int | None = None,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> None:
    """Write config.json and the global weights, in shards of 5 GB.

    `eod`: the token that ends a document. `progress` is told of each tensor's bytes. Raises
    ConfigError if the checkpoint is not of this model, and DataError if it cannot be read.
    """
    if model.attention_gate:
        raise ConfigError(
            "model.attention_gate=true: neither of the two Hugging Face models that export knows, "
            "Qwen3 and Gemma3, has such a gate"
        )
    if model.experts:
        raise ConfigError(
            f"model.experts={model.experts}: export knows Hugging Face's dense Qwen3 and Gemma3, "
            "not a model of experts"
        )
    _check_model(saved, model)
    _write_json(folder / "config.json", config_of(model, dtype, eod))
    shards = _Shards(folder)
    for name, tensor in saved.global_weights():
        for target, weight in weights_of(name, tensor, model).items():
            shards.add(target, weight.to(dtype))
        progress(tensor.nbytes)
    shards.finish()


def _check_model(saved: Saved, model: ModelConfig) -> None:
    stored = saved.global_shapes()
    expected = logical_shapes(model)
    for name in sorted(stored.keys() | expected.keys()):
        if stored.get(name) != expected.get(name):
            raise ConfigError(
                f"{saved.path} is not of the model that the configuration describes: {name} is "
                f"{stored.get(name, 'absent')} in it and would be {expected.get(name, 'absent')}"
            )


class _Shards:
    """Weights into files of at most SHARD_BYTES, as the library names them."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._files: list[dict[str, int]] = []  # sizes by weight

    def add(self, name: str, weight: Tensor) -> None:
        size_bytes = sum(tensor.nbytes for tensor in self._pending.values()) + weight.nbytes
        if self._pending and size_bytes > SHARD_BYTES:
            self._flush()
        self._pending[name] = weight.contiguous()

    def finish(self) -> None:
        self._flush()
        count = len(self._files)
        names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        )
        for number, name in enumerate(names):
            self._temporary(number).rename(self._folder / name)
        if count > 1:
            places = {
                weight: name
                for name, sizes in zip(names, self._files, strict=True)
                for weight in sizes
            }
            total = sum(size for sizes in self._files for size in sizes.values())
            index = {"metadata": {"total_size": total}, "weight_map": places}
            _write_json(self._folder / "model.safetensors.index.json", index)

    def _flush(self) -> None:
        path = self._temporary(len(self._files))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from None
        folders.sync(path)
        self._files.append({name: weight.nbytes for name, weight in self._pending.items()})
        self._pending = {}

    def _temporary(self, number: int) -> Path:
        return self._folder / f"shard-{number}"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
