"""The routing as people read it: a row for each logical parameter, with who owns it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.muon.routing import Route, fold, ranges


@dataclass(frozen=True)
class Row:
    """How one logical parameter is optimised, and where."""

    name: str
    shape: tuple[int, ...]
    split: str  # "whole", or the logical parameters that share one weight, as in "q+k+v"
    route: Route
    owners: tuple[int, ...]  # ranks in the replica; a Muon matrix has one, its home


def rows_of(optimizer: InnerOptimizer) -> list[Row]:
    """A row for each parameter of the whole model. A collective call of the replica's ranks."""
    plan = optimizer.stage.plan
    splits = {name: _split(p.names) for p in plan.parameters for name in p.names}
    mine = {block.name: (block.shape, splits[block.name]) for block in optimizer.blocks}
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
        for name, route in plan.routes.items()
    ]


def write(rows: Sequence[Row], path: Path) -> None:
    """As JSON: a list with an object for each parameter."""
    objects = [
        {"name": row.name, "shape": row.shape, "split": row.split, "owners": row.owners}
        | asdict(row.route)
        for row in rows
    ]
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(json.dumps(objects, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def as_text(rows: Sequence[Row]) -> str:
    """For a terminal, with equal rows of layers as one."""
    owners: dict[tuple, set[int]] = {}
    for row in rows:
        owners.setdefault(_kind(row.name, _same(row)), set()).update(row.owners)
    lines = [("parameter", "shape", "split", "optimizer", "scale", "lr ×", "decay", "ranks", "why")]
    for name, same in fold({row.name: _same(row) for row in rows}).items():
        shape, split, route = same
        lines.append(
            (
                name,
                " × ".join(map(str, shape)),
                f"{split}, {route.heads} heads" if route.heads > 1 else split,
                route.optimizer,
                f"{route.scale:.4g}",
                f"{route.lr_factor:g}",
                f"{route.weight_decay:g}",
                ranges(sorted(owners[_kind(name, same)])),
                route.reason,
            )
        )
    return align(lines)


def align(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def _same(row: Row) -> tuple[tuple[int, ...], str, Route]:
    return row.shape, row.split, row.route


def _kind(name: str, same: tuple) -> tuple:
    return name.split(".", 2)[-1], same


def _split(names: Sequence[str]) -> str:
    return "+".join(name.rsplit(".", 1)[-1] for name in names) if len(names) > 1 else "whole"
