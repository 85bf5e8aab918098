"""Which optimizer each logical parameter gets, and why."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from megatron_ext.errors import ConfigError
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.logical import Kind, kind_of, logical_shapes
from megatron_ext.muon.config import OptimizerConfig, Rule
from megatron_ext.muon.newton_schulz import update_scale


@dataclass(frozen=True)
class Route:
    """How one logical parameter is optimised."""

    optimizer: Literal["muon", "adamw"]
    scale: float  # factor on Muon's orthogonal update
    weight_decay: float
    reason: str
    lr_factor: float = 1.0
    heads: int = 1  # equal blocks of rows that are orthogonalised one by one

    def part(self, shape: tuple[int, int]) -> tuple[int, int]:
        """What is orthogonalised as one matrix in a parameter of this shape."""
        return shape[0] // self.heads, shape[1]


def route_all(model: ModelConfig, config: OptimizerConfig) -> dict[str, Route]:
    """The routes of a whole model, by logical name, with the configuration's rules applied.

    Raises ConfigError for a rule that matches nothing, or asks for what cannot be.
    """
    shapes = logical_shapes(model)
    for rule in config.rules:
        if not any(fnmatchcase(name, rule.match) for name in shapes):
            raise ConfigError(
                f"optimizer.rules: {rule.match!r} matches no parameter; names are like "
                "embedding, head, final_norm, layers.0.attention.q, layers.0.mlp.down"
            )
    of_queries = dict.fromkeys(("attention.q", "attention.gate"), model.heads)
    heads = of_queries | dict.fromkeys(("attention.k", "attention.v"), model.kv_heads)
    return {
        name: route(name, kind_of(name), shape, config, heads.get(name.split(".", 2)[-1], 1))
        for name, shape in shapes.items()
    }


def route(
    name: str, kind: Kind, shape: tuple[int, ...], config: OptimizerConfig, heads: int = 1
) -> Route:
    """The route of one logical parameter, which holds this many heads one below the other.

    Muon takes the matrices inside layers; embedding, head and norms go to AdamW (MuLoCo, arXiv
    2505.23725), and so does a matrix of one row or column, which has nothing to orthogonalise.
    """
    may_be_muon = kind == "matrix" and min(shape) > 1
    if config.name == "adamw":
        chosen, reason = "adamw", "optimizer.name=adamw"
    elif may_be_muon:
        chosen, reason = "muon", "2-D in layer"
    else:
        chosen, reason = "adamw", kind if kind != "matrix" else "one row or column"
    found = Route(chosen, 1.0, config.weight_decay, reason)
    for rule in config.rules:
        if fnmatchcase(name, rule.match):
            found = _apply(rule, found)
    if found.optimizer != "muon":
        return found
    if not may_be_muon:
        raise ConfigError(
            f"optimizer.rules give {name} {list(shape)} to muon, which is for matrices inside "
            "layers; narrow match, or use optimizer: adamw"
        )
    if config.per_head:
        found = replace(found, heads=heads)
    return replace(found, scale=update_scale(found.part(shape), config.scale))


def _apply(rule: Rule, found: Route) -> Route:
    changes = rule.model_dump(exclude={"match"}, exclude_none=True)
    reason = f"rule {rule.match}"
    if rule.optimizer is None:
        reason = f"{found.reason}, {reason}"
    return replace(found, **changes, reason=reason)


def fold[Value](table: Mapping[str, Value]) -> dict[str, Value]:
    """A table by logical name with equal entries of layers, and of experts, as one.

    Like "layers.0-3,5.mlp.up" and "layers.0-3.experts.0-7.up".
    """
    return _fold_indices(_fold_indices(table, "experts"), "layers")


def _fold_indices[Value](table: Mapping[str, Value], word: str) -> dict[str, Value]:
    """As one the equal entries whose names differ only in the number behind a word."""
    alike: dict[tuple[str, str, Value], list[int]] = {}
    for name, value in table.items():
        match = re.fullmatch(rf"(.*\b{word}\.)(\d+)(\..+)", name)
        before, index, after = match.groups() if match else (name, None, "")
        indices = alike.setdefault((before, after, value), [])
        if index is not None:
            indices.append(int(index))
    return {
        f"{before}{ranges(indices)}{after}": value
        for (before, after, value), indices in alike.items()
    }


def identity(routes: Mapping[str, Route]) -> dict[str, str]:
    """The folded routes as texts, for checkpoints, which tell by them how a resumed run differs.

    Which optimizer a parameter has stands apart: it decides which state there is.
    """
    optimizers = {name: route.optimizer for name, route in routes.items()}
    factors = {name: replace(route, reason="") for name, route in routes.items()}
    return {f"optimizer of {name}": optimizer for name, optimizer in fold(optimizers).items()} | {
        f"routing {name}": (
            f"scale {route.scale:g}, lr × {route.lr_factor:g}, "
            f"weight decay {route.weight_decay:g}, heads {route.heads}"
        )
        for name, route in fold(factors).items()
    }


def ranges(indices: list[int]) -> str:
    """ "0-3,7" for [0, 1, 2, 3, 7]."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
