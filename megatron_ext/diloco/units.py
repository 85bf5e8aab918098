"""What is coded and reduced as one, and in which fragment: decided by the model alone.

Values that come out of a compressed exchange so depend on no layout.
"""

from collections.abc import Iterable
from typing import Literal

from megatron_ext.blocks import Block
from megatron_ext.errors import ConfigError
from megatron_ext.model.logical import kind_of

# Embedding and head are coded in blocks of whole rows of about this many elements.
_ROW_BLOCK_NUMEL = 2**20

Order = Literal["contiguous", "strided"]


def units_of(name: str, shape: tuple[int, ...]) -> list[Block]:
    """The units of a logical parameter: all of it, or blocks of rows of an embedding or head."""
    if kind_of(name) not in ("embedding", "head"):
        return [Block(name, shape, (0,) * len(shape), shape)]
    rows, cols = shape
    step = max(1, _ROW_BLOCK_NUMEL // cols)
    return [
        Block(name, shape, (first, 0), (min(step, rows - first), cols))
        for first in range(0, rows, step)
    ]


def fragments_of(names: Iterable[str], count: int, order: Order) -> dict[str, int]:
    """The fragment, 0 … count − 1, of each logical parameter of the whole model.

    Contiguous, the embedding counts as one more layer before the first and the final norm with the
    head as one after the last, and the first fragments are the larger ones (MuLoCo's published
    code). Strided, layer i goes to fragment i mod count (Streaming DiLoCo, arXiv 2501.18512), the
    embedding to the first fragment and the head to the last.

    Raises ConfigError as `check_fragments` does.
    """
    names = list(names)
    layers = 1 + max(int(name.split(".")[1]) for name in names if name.startswith("layers."))
    check_fragments(layers, count, order)
    if order == "strided":
        of_layer = [layer % count for layer in range(layers)]
        first, last = 0, count - 1
    else:
        size, rest = divmod(layers + 2, count)
        sizes = [size + (index < rest) for index in range(count)]
        first, *of_layer, last = [f for f, length in enumerate(sizes) for _ in range(length)]
    return {name: _fragment_of(name, of_layer, first, last) for name in names}


def check_fragments(layers: int, count: int, order: Order) -> None:
    """Raise ConfigError for more fragments than layers, embedding and head can fill."""
    most = layers + (1 if order == "strided" else 2)
    if count > most:
        raise ConfigError(
            f"outer.fragments={count} would leave some empty; with model.layers={layers} and "
            f"outer.fragment_order={order} use at most {most}"
        )


def _fragment_of(name: str, of_layer: list[int], first: int, last: int) -> int:
    if name.startswith("layers."):
        return of_layer[int(name.split(".")[1])]
    return first if name == "embedding" else last


def offsets(interval: int, count: int) -> list[int]:
    """Where in a round each fragment is sent: after ⌊H/P·(i + 1)⌋ inner steps, the last at H."""
    return [interval * (index + 1) // count for index in range(count)]
