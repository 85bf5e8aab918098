"""A rank's share of what replicas exchange: whole units, whatever the layout cut them into.

Most units already lie whole on the rank that owns their master. Those that tensor or data
parallelism cut (AdamW's matrices, rows of an embedding at a boundary) are carried to one of the
ranks that hold a part, over the replica's own network.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_ext.blocks import Block
from megatron_ext.diloco.units import units_of
from megatron_ext.muon.exchange import copy_all, exchange
from megatron_ext.muon.views import total_numel, views

Rectangles = dict[str, list[tuple[int, Block]]]
"""(rank, block) of everything that is owned, by parameter."""


class Share:
    """The units of each fragment that have their home on this rank, and their way there and back.

    Attributes:
        units: for each fragment this rank's units: matrices and rows of them first, then norms.
    """

    def __init__(
        self, blocks: Sequence[Block], masters: torch.Tensor, fragments: Mapping[str, int]
    ):
        """Collective over the replica. `masters`: flat, all blocks one after another."""
        self._masters = masters
        self._rank, size = dist.get_rank(), dist.get_world_size()
        self._of_block = dict(zip(blocks, views(masters, [b.size for b in blocks]), strict=True))
        everywhere: list[list[Block]] = [[]] * size
        dist.all_gather_object(everywhere, list(blocks))
        owned: Rectangles = {}
        for rank, theirs in enumerate(everywhere):
            for block in theirs:
                owned.setdefault(block.name, []).append((rank, block))
        order = sorted(owned, key=lambda name: len(owned[name][0][1].shape) == 1)
        count = max(fragments.values()) + 1
        self.units: list[list[Block]] = [[] for _ in range(count)]
        # For each fragment what travels: (unit, its home, who holds a part, that part's block).
        self._parts: list[list[tuple[Block, int, int, Block]]] = [[] for _ in range(count)]
        load = [0] * size
        for name in order:
            for unit in units_of(name, owned[name][0][1].shape):
                holders = [(r, block) for r, block in owned[name] if _overlap(unit, block)]
                home = min({rank for rank, _ in holders}, key=lambda r: (load[r], r))
                load[home] += total_numel([unit.size])
                fragment = fragments[name]
                self._parts[fragment] += [(unit, home, rank, block) for rank, block in holders]
                if home == self._rank:
                    self.units[fragment].append(unit)

    def collect(self, fragment: int) -> torch.Tensor:
        """The masters of a fragment's units, one after another, FP32. Collective if any is cut."""
        flat = torch.empty(total_numel(self._sizes(fragment)), device=self._masters.device)
        self._move(fragment, flat, to_masters=False)
        return flat

    def deliver(self, fragment: int, flat: torch.Tensor) -> None:
        """The way back: set the masters of a fragment. Collective if any unit is cut."""
        self._move(fragment, flat.to(self._masters.device), to_masters=True)

    def _sizes(self, fragment: int) -> list[tuple[int, ...]]:
        return [unit.size for unit in self.units[fragment]]

    def _move(self, fragment: int, flat: torch.Tensor, to_masters: bool) -> None:
        size = dist.get_world_size()
        at_home: list[list[torch.Tensor]] = [[] for _ in range(size)]  # by who holds the part
        lying_here: list[list[torch.Tensor]] = [[] for _ in range(size)]  # by its unit's home
        of_unit = dict(zip(self.units[fragment], views(flat, self._sizes(fragment)), strict=True))
        for unit, home, holder, block in self._parts[fragment]:
            common = _overlap(unit, block)
            if home == self._rank:
                at_home[holder].append(of_unit[unit][_within(unit, common)])
            if holder == self._rank:
                lying_here[home].append(self._of_block[block][_within(block, common)])
        sources, destinations = (at_home, lying_here) if to_masters else (lying_here, at_home)
        if all(home == holder for _, home, holder, _ in self._parts[fragment]):
            copy_all(destinations[self._rank], sources[self._rank])
            return
        device = self._masters.device
        exchange(sources, destinations, torch.float32, device, dist.group.WORLD)()


def _overlap(left: Block, right: Block) -> tuple[slice, ...] | None:
    """What two blocks of one parameter have in common, as an index of the whole parameter."""
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(left.slices, right.slices, strict=True)
    )
    return common if all(part.start < part.stop for part in common) else None


def _within(block: Block, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """An index of the whole parameter as one of the block."""
    return tuple(
        slice(part.start - begin, part.stop - begin)
        for part, begin in zip(index, block.offset, strict=True)
    )
