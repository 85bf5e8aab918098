"""Which optimizer each logical parameter gets, and why."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_ext.model.logical import Kind
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.newton_schulz import update_scale


@dataclass(frozen=True)
class Route:
    """How one logical parameter is optimised."""

    optimizer: Literal["muon", "adamw"]
    scale: float  # factor on Muon's orthogonal update
    weight_decay: float
    reason: str


def route(name: str, kind: Kind, shape: tuple[int, ...], config: OptimizerConfig) -> Route:
    """The route of one logical parameter.

    Muon takes the matrices inside layers; embedding, head and norms go to AdamW (MuLoCo, arXiv
    2505.23725), and so does a matrix of one row or column, which has nothing to orthogonalise.
    """
    if config.name == "adamw":
        return Route("adamw", 1.0, config.weight_decay, "optimizer.name=adamw")
    if kind == "matrix" and min(shape) > 1:
        return Route("muon", update_scale(shape, config.scale), config.weight_decay, "2-D in layer")
    reason = kind if kind != "matrix" else "one row or column"
    return Route("adamw", 1.0, config.weight_decay, reason)


def fingerprint(routes: dict[str, Route]) -> str:
    """SHA-256 of a whole model's routing, stored in checkpoints to notice a changed one."""
    table = {name: asdict(route) for name, route in sorted(routes.items())}
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()
