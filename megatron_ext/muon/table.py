"""The routing as people read it: a row for each logical parameter, with who owns it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ext.muon.newton_schulz import Kernel
from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.muon.routing import Route, fold


@dataclass(frozen=True)
class Row:
    """How one logical parameter is optimised, and where."""

    name: str
    shape: tuple[int, ...]
    split: str  # "whole", or the logical parameters that share one weight, as in "q+k+v"
    kernel: Kernel | None  # what computes the products, for a Muon matrix
    route: Route
    owners: tuple[int, ...]  # ranks in the replica; a Muon matrix has one, its home


def rows_of(optimizer: InnerOptimizer) -> list[Row]:
    """A row for each parameter of the whole model. A collective call of the replica's ranks."""
    stage = optimizer.stage
    held = [parameter for part in stage.parts for parameter in part.plan.parameters]
    splits = {name: _split(parameter.names) for parameter in held for name in parameter.names}
    kernels = optimizer.kernels()
    mine = {
        block.name: (block.shape, splits[block.name], kernels.get(block.name))
        for block in optimizer.blocks
    }
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    owners: dict[str, list[int]] = {}
    described = {}
    for rank, owned in enumerate(everyone):
        described |= owned
        for name in owned:
            owners.setdefault(name, []).append(rank)
    return [
        Row(name, *described[name], route, tuple(owners[name]))
        for name, route in stage.routes.items()
    ]


def write(rows: Sequence[Row], path: Path) -> None:
    """As JSON: a list with an object for each parameter."""
    objects = [asdict(row) for row in rows]
    objects = [each | each.pop("route") for each in objects]
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(json.dumps(objects, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def summary(rows: Sequence[Row]) -> str:
    """For a terminal: a line for all that are updated alike and for the same reason."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        route = row.route
        heads = f", {route.heads} heads" if route.heads > 1 else ""
        kind = (route.optimizer + heads, f"{route.lr_factor:g}", f"{route.weight_decay:g}")
        alike.setdefault((*kind, route.reason), []).append(row)
    lines = [("optimizer", "parameters", "lr ×", "decay", "products", "why", "which")]
    for (optimizer, *factors, why), some in sorted(alike.items(), reverse=True):
        kernels = ", ".join(sorted({row.kernel for row in some if row.kernel}))
        which = _folded([row.name for row in some])
        lines.append((optimizer, str(len(some)), *factors, kernels, why, which))
    return align(lines)


def _folded(names: Sequence[str]) -> str:
    """ "layers.0-3.attention.{q,k}, layers.0-3.mlp.down" for the names of those twelve."""
    last_parts: dict[str, list[str]] = {}
    for name in fold(dict.fromkeys(names)):
        *parents, last = name.rsplit(".", 1)
        last_parts.setdefault(f"{parents[0]}." if parents else "", []).append(last)
    return ", ".join(
        f"{parent}{{{','.join(last)}}}" if len(last) > 1 else f"{parent}{last[0]}"
        for parent, last in last_parts.items()
    )


def align(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def _split(names: Sequence[str]) -> str:
    return "+".join(name.rsplit(".", 1)[-1] for name in names) if len(names) > 1 else "whole"
