"""Codecs: how a pseudogradient is packed for the wire."""

from typing import Literal, get_args

import torch

from megatron_ext.diloco.codecs.base import Codec, Packed
from megatron_ext.diloco.codecs.cast import Cast
from megatron_ext.diloco.codecs.topk import TopK
from megatron_ext.diloco.codecs.uniform import Linear, Statistical
from megatron_ext.errors import ConfigError

__all__ = ["Codec", "Kind", "Packed", "make"]

Kind = Literal["fp32", "bf16", "linear", "statistical", "topk"]

_UNIFORM = {"linear": Linear, "statistical": Statistical}
_CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(
    kind: Kind,
    bits: int | None = None,
    per_row: bool = False,
    keep: float | None = None,
    chunk: int | None = None,
) -> Codec:
    """A codec.

    Args:
        kind: fp32 and bf16 keep every value; linear and statistical take 2, 4 or 8 bits a value;
            topk keeps some values whole.
        bits: of a code; linear and statistical need it.
        per_row: linear and statistical measure each row of a matrix for itself.
        keep: fraction of the values that topk keeps; it needs it.
        chunk: topk keeps the fraction of each stretch of so many values, not of the whole tensor.

    Raises ConfigError for what does not go together, in the words of the outer.* options.
    """
    if kind not in get_args(Kind):
        raise ConfigError(f"outer.codec={kind} is unknown; it is {', '.join(get_args(Kind))}")
    for option, value, owners in (
        ("bits", bits, ("linear", "statistical")),
        ("per_row", per_row or None, ("linear", "statistical")),
        ("keep", keep, ("topk",)),
        ("chunk", chunk, ("topk",)),
    ):
        if value is not None and kind not in owners:
            raise ConfigError(
                f"outer.{option}={value} is for outer.codec={' or '.join(owners)}; "
                f"outer.codec={kind} has no use for it"
            )
    if kind in _CASTS:
        return Cast(_CASTS[kind])
    if kind == "topk":
        if keep is None or not 0 < keep <= 1:
            raise ConfigError(
                f"outer.codec=topk needs outer.keep above 0 and up to 1, the fraction of values "
                f"that it keeps; it is {keep}"
            )
        return TopK(keep, chunk)
    if bits not in (2, 4, 8):
        raise ConfigError(f"outer.codec={kind} needs outer.bits of 2, 4 or 8; it is {bits}")
    return _UNIFORM[kind](bits, per_row)
