"""The way back: a Hugging Face folder as weights by logical name.

Only what computes exactly what this project's blocks compute is taken; anything else is refused by
the name of the feature that is in the way.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ext.checkpoint.huggingface import name_of
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.logical import logical_shapes

_ARCHITECTURES = {"Gemma3ForCausalLM": True, "Qwen3ForCausalLM": False}
"""Architecture, and whether it has sandwich norms."""


def model_of(folder: Path) -> ModelConfig:
    """The model that a folder's config.json describes.

    Raises ConfigError naming the first feature that these blocks do not have.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no Hugging Face folder: there is no config.json") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: architecture {architecture} cannot be imported; these can: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    sandwich = _ARCHITECTURES[architecture]
    try:
        _refuse_features(config, sandwich, path)
        return ModelConfig(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            ffn=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            sequence_length=config["max_position_embeddings"],
            sandwich_norm=sandwich,
            # A tied Gemma scales the embedding and not the head, so here they are two.
            tie_head=not sandwich and config.get("tie_word_embeddings", False),
            norm_epsilon=config["rms_norm_eps"],
            rope_base=int(_rope_base(config)),
        )
    except KeyError as error:
        raise ConfigError(f"{path} does not say {error.args[0]}") from None


def weights_of(folder: Path, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights by logical name, whole and fp32.

    Raises ConfigError for a weight that the model has no place for, and DataError for one that is
    missing, has another shape, or cannot be read.
    """
    places = _places(folder)
    left = set(places)
    for name, shape in logical_shapes(model).items():
        source = name_of(name, model)
        if source not in places and name == "head" and not model.tie_head:
            source = name_of("embedding", model)
        if source not in places:
            raise DataError(f"{folder} has no weight {source}")
        left.discard(source)
        tensor = _read(places[source], source).float()
        if tuple(tensor.shape) != shape:
            raise DataError(
                f"{folder}: {source} is {list(tensor.shape)} and should be {list(shape)}"
            )
        yield name, _value(name, tensor, model)
    left -= {name_of("head", model)} if model.tie_head else set()
    if left:
        raise ConfigError(
            f"{folder}: {min(left)} has no place in these blocks; a model with it cannot be "
            "imported"
        )


def _value(name: str, tensor: Tensor, model: ModelConfig) -> Tensor:
    if not model.sandwich_norm:
        return tensor
    if name == "embedding":
        return tensor * math.sqrt(model.hidden)
    return tensor + 1 if name.endswith("norm") else tensor


def _refuse_features(config: dict[str, Any], sandwich: bool, path: Path) -> None:
    layers = config["num_hidden_layers"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if width * config["num_attention_heads"] != config["hidden_size"]:
        raise ConfigError(
            f"{path}: head_dim={width} × num_attention_heads={config['num_attention_heads']} is "
            f"not hidden_size={config['hidden_size']}; these blocks need that"
        )
    activation = "hidden_activation" if sandwich else "hidden_act"
    expected: dict[str, Any] = {
        activation: "silu",
        "layer_types": ["full_attention"] * layers,
        "attention_bias": False,
        "query_pre_attn_scalar": width,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    # Where a key is absent the architecture's own default holds.
    defaults = {
        activation: "gelu_pytorch_tanh" if sandwich else "silu",
        "layer_types": None if sandwich or config.get("use_sliding_window") else [],
        "attention_bias": False,
        "query_pre_attn_scalar": 256 if sandwich else width,
    }
    for feature, value in expected.items():
        found = config.get(feature, defaults.get(feature))
        if feature == "layer_types" and found == []:
            continue
        if (found or None) != (value or None):
            shown = sorted(set(found)) if isinstance(found, list) else found
            raise ConfigError(
                f"{path}: {feature}={shown} cannot be imported; these blocks have "
                f"{value[0] if isinstance(value, list) else value}"
            )


def _rope_base(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {
        "rope_theta": config["rope_theta"],
        **(config.get("rope_scaling") or {}),
    }
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"config.json: rope_type={kind} with {rope} cannot be imported; these blocks have "
            "plain rotary positions"
        )
    return rope["rope_theta"]


def _places(folder: Path) -> dict[str, Path]:
    """The file of each weight."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {weight: folder / name for weight, name in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{index} is damaged: it has no weight_map") from None
    single = folder / "model.safetensors"
    if not single.is_file():
        raise DataError(
            f"{folder} has neither {single.name} nor {index.name}; only safetensors are read"
        )
    try:
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise DataError(f"{single} cannot be read: {error}") from None


def _read(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
