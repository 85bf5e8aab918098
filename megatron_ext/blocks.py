"""The unit in which the state of a run is owned, saved and moved."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A rectangle of one logical parameter that this rank owns.

    Every element of every logical parameter lies in exactly one block of exactly one rank of a
    replica. A block names its place in the whole, so nothing that holds blocks depends on the
    layout (TP, PP, DP) that cut them.
    """

    name: str  # global logical name, for example "layers.3.attention.q"
    shape: tuple[int, ...]  # of the whole logical parameter
    offset: tuple[int, ...]  # where this block begins in it
    size: tuple[int, ...]  # of this block

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offset) == len(self.size):
            raise ValueError(f"{self.name}: shape, offset and size differ in rank: {self}")
        for whole, begin, length in zip(self.shape, self.offset, self.size, strict=True):
            if begin < 0 or length < 0 or begin + length > whole:
                raise ValueError(f"{self.name}: block {self} reaches out of its parameter")

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this block in the whole logical parameter."""
        return tuple(
            slice(begin, begin + length)
            for begin, length in zip(self.offset, self.size, strict=True)
        )
