"""One all-to-all that moves many pieces of many parameters at once."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Pieces = Sequence[Sequence[torch.Tensor]]


def exchange(
    sources: Pieces,
    destinations: Pieces,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    add: bool = False,
) -> Callable[[], None]:
    """Start to copy pieces between the ranks of a group; the returned call waits and delivers.

    Args:
        sources: for each rank of the group the tensors that this rank sends to it, in an order
            that both sides know. They may change as soon as this function has returned.
        destinations: for each rank the tensors that take what it sends, shapes as sent. Those of
            this rank itself are written at once, the others by the returned call.
        dtype: what travels; sources and destinations are cast to and from it.
        device: where the pieces are (a rank may have none).
        add: add to the destinations instead of overwriting them.
    """
    me, size = group.rank(), group.size()
    put = add_all if add else copy_all
    put(destinations[me], sources[me])
    if size == 1:
        return lambda: None
    outgoing = [() if rank == me else pieces for rank, pieces in enumerate(sources)]
    incoming = [() if rank == me else pieces for rank, pieces in enumerate(destinations)]
    sent, sent_views, sent_numels = _flat(outgoing, dtype, device)
    received, received_views, received_numels = _flat(incoming, dtype, device)
    copy_all(sent_views, _flatten(outgoing))
    work = dist.all_to_all_single(
        received, sent, received_numels, sent_numels, group=group, async_op=True
    )

    def deliver() -> None:
        work.wait()
        put(_flatten(incoming), received_views)

    return deliver


def copy_all(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, in few kernels where the device has them."""
    if destinations:  # the library call refuses empty lists
        torch._foreach_copy_(list(destinations), list(sources))


def add_all(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Add tensor by tensor, as `copy_all` copies."""
    if destinations:
        torch._foreach_add_(list(destinations), list(sources))


def _flat(
    pieces: Pieces, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
    """A buffer for all pieces, its views in their shapes, and the elements for each rank."""
    all_pieces = _flatten(pieces)
    numels = [sum(piece.numel() for piece in of_rank) for of_rank in pieces]
    buffer = torch.empty(sum(numels), dtype=dtype, device=device)
    views = buffer.split([piece.numel() for piece in all_pieces])
    shaped = [view.view(piece.shape) for view, piece in zip(views, all_pieces, strict=True)]
    return buffer, shaped, numels


def _flatten(pieces: Pieces) -> list[torch.Tensor]:
    return [piece for of_rank in pieces for piece in of_rank]
