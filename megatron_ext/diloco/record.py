"""What an outer step did, and what its pseudogradients say."""

from dataclasses import dataclass

import torch

from megatron_ext.diloco.collective import Sums


@dataclass(frozen=True)
class Round:
    """What an outer step of one fragment did: a line of rounds.jsonl. Norms are of the fragment."""

    round: int  # from 1, of this fragment
    fragment: int
    step: int  # inner steps taken so far
    sent: int  # inner steps taken when it was sent
    replicas: int
    tokens: list[float]  # that each replica trained on for it: its weight in the mean
    left_out: list[int]  # replicas whose pseudogradient was not used
    pseudogradient_norm: float  # of the mean
    norms: list[float]  # of each replica's
    cosine: float | None  # between the pseudogradients of two replicas, on average
    cosine_to_mean: list[float]  # of each replica's
    drift: float  # ‖θ_replica − θ‖ / ‖θ‖, on average
    error_ratio: float  # ‖e‖ / ‖Δ‖ of error feedback, on average
    compression_error: float  # relative norm of what packing left out
    lr: float  # outer
    momentum: float
    bytes_sent: int  # by this replica to the others
    bytes_planned: int
    seconds: float  # from sending it to having applied it, without the delay
    exposed_seconds: float  # of them, those in which training stood still


@dataclass(frozen=True)
class Before:
    """What is known of every replica before the exchange."""

    norms: list[float]  # of the pseudogradients
    anchor_norm: float
    tokens: list[float]


@dataclass(frozen=True)
class Summary:
    """What an exchange left behind, of the whole replica: the plain numbers of a Round."""

    tokens: list[float]
    left_out: list[int]
    pseudogradient_norm: float
    norms: list[float]
    cosine: float | None
    cosine_to_mean: list[float]
    drift: float
    error_ratio: float
    compression_error: float
    bytes_sent: int
    bytes_planned: int


def pack(sums: Sums, error_norm: float) -> torch.Tensor:
    """The scalars of one rank that are gathered from all replicas and added up in each: FP64."""
    return torch.tensor(
        [
            sums.mean,
            sums.product,
            sums.residual,
            sums.coded,
            error_norm**2,
            sums.bytes_sent,
            sums.bytes_planned,
        ],
        dtype=torch.float64,
    )


def summarise(before: Before, left_out: list[int], totals: torch.Tensor, own: int) -> Summary:
    """`totals` [K, scalars]: what `pack` gave, added up over the ranks of each replica."""
    mean, product, residual, coded, error, sent, planned = totals.unbind(1)
    mean_norm = mean[0].sqrt().item()
    used = [index for index in range(len(before.norms)) if index not in left_out]
    norms = [before.norms[index] for index in used]
    to_mean = [
        product[index].item() / max(before.norms[index] * mean_norm, _TINY) for index in used
    ]
    size = max(sum(norms) / len(norms), _TINY)
    weights = [before.tokens[index] for index in used]
    return Summary(
        tokens=before.tokens,
        left_out=left_out,
        pseudogradient_norm=mean_norm,
        norms=norms,
        cosine=_cosine(norms, weights, mean_norm),
        cosine_to_mean=to_mean,
        drift=size / max(before.anchor_norm, _TINY),
        error_ratio=error.sqrt().mean().item() / size,
        compression_error=(residual.sum() / coded.sum().clamp(min=_TINY)).sqrt().item(),
        bytes_sent=int(sent[own]),
        bytes_planned=int(planned[own]),
    )


_TINY = 1e-300


def _cosine(norms: list[float], weights: list[float], mean_norm: float) -> float | None:
    """Σ wi wj ⟨Δi, Δj⟩ / Σ wi wj ‖Δi‖‖Δj‖ over pairs i ≠ j, which needs no pair's product.

    With two replicas, or equal weights and norms, it is the mean pairwise cosine.
    """
    total = sum(weights)
    parts = [norm * weight / total for norm, weight in zip(norms, weights, strict=True)]
    squares = sum(part**2 for part in parts)
    products = sum(parts) ** 2 - squares
    if len(parts) == 1 or products == 0:
        return None
    return (mean_norm**2 - squares) / products
