"""How long replicas wait for the link between them, under three sets of assumptions.

`streaming-diloco` is the simulation behind the bandwidth tables of Streaming DiLoCo (arXiv
2501.18512) and of the scaling laws for DiLoCo (arXiv 2503.09799), found by fitting them: a step is
one third forward and two thirds backward; a layer's update leaves when its backward ends; a value
costs 13/16 of its nominal bits; a fragment hides behind half a step, and behind each step by which
it is delayed. `muloco` is the idealised wall-clock model of MuLoCo (arXiv 2505.23725): all values
once, nothing hidden. `measured` is what this program does: it sends what its collectives count,
2·(K − 1)/K of the values, and hides it only behind the steps of a delay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Assumption = Literal["streaming-diloco", "muloco", "measured"]
ASSUMPTIONS: tuple[Assumption, ...] = ("streaming-diloco", "muloco", "measured")

_FITTED_SHARE_OF_BITS = 13 / 16
_FITTED_STEPS_BEHIND_A_FRAGMENT = 0.5

PUBLISHED_GRID_GBIT = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
"""The bandwidths among which the published tables choose, in Gbit/s."""


@dataclass(frozen=True)
class Link:
    """What one replica can send to the others."""

    gbit: float  # Gbit/s
    latency_seconds: float = 0.0

    def seconds(self, bits: float) -> float:
        """Time to send that much, once."""
        return self.latency_seconds + bits / (self.gbit * 1e9)


@dataclass(frozen=True)
class Exchange:
    """What replicas send one another, and when."""

    parameters: float
    layers: int
    bits: float = 32  # of one value on the wire
    interval: int = 1  # inner steps from one synchronisation of everything to the next (H)
    fragments: int = 1  # P
    delay: int = 0  # inner steps from sending a fragment to applying it (τ)
    replicas: int = 2  # K
    gather: bool = False  # everything to all others, and no second leg

    @property
    def times_sent(self) -> float:
        """How often a replica sends each value, counted as the collectives count it."""
        return (self.replicas - 1) * (1 if self.gather else 2 / self.replicas)


def round_seconds(exchange: Exchange, step_seconds: float, link: Link, assume: Assumption) -> float:
    """Wall-clock time of `interval` inner steps of `step_seconds` with all that they wait for."""
    compute = exchange.interval * step_seconds
    bits = exchange.parameters * exchange.bits
    if assume == "muloco":
        return compute + link.seconds(bits)
    if assume == "measured":
        hidden_steps = exchange.delay
        sent = exchange.times_sent * bits / exchange.fragments
        # Norms go ahead, what was measured follows; between them one leg or two.
        messages = 3 if exchange.gather else 4
        seconds = (messages - 1) * link.latency_seconds + link.seconds(sent)
        if exchange.replicas == 1:
            return compute
    else:
        bits *= _FITTED_SHARE_OF_BITS
        if exchange.fragments == 1 and exchange.delay == 0:
            return compute - step_seconds + _last_step_seconds(exchange, bits, step_seconds, link)
        hidden_steps = exchange.delay + _FITTED_STEPS_BEHIND_A_FRAGMENT
        seconds = link.seconds(bits / exchange.fragments)
    exposed = max(0.0, seconds - hidden_steps * step_seconds)
    return compute + exchange.fragments * exposed


def _last_step_seconds(exchange: Exchange, bits: float, step_seconds: float, link: Link) -> float:
    """A step whose layers are sent one by one, each as soon as its backward has ended."""
    finished = 0.0
    for layer in range(1, exchange.layers + 1):
        backward_ends = step_seconds / 3 * (1 + 2 * layer / exchange.layers)
        finished = max(finished, backward_ends) + link.seconds(bits / exchange.layers)
    return finished


def utilisation(exchange: Exchange, step_seconds: float, link: Link, assume: Assumption) -> float:
    """Share of the time in which the replicas compute."""
    compute = exchange.interval * step_seconds
    return compute / round_seconds(exchange, step_seconds, link, assume)


def needed_gbit(
    exchange: Exchange,
    step_seconds: float,
    target: float,
    assume: Assumption,
    grid_gbit: Sequence[float] = PUBLISHED_GRID_GBIT,
) -> float | None:
    """The least bandwidth of a rising grid that reaches a utilisation; None if none does."""
    return next(
        (
            gbit
            for gbit in grid_gbit
            if utilisation(exchange, step_seconds, Link(gbit), assume) >= target
        ),
        None,
    )


def bytes_per_round(exchange: Exchange) -> float:
    """What one replica sends to the others, as this program does it."""
    return exchange.times_sent * exchange.parameters * exchange.bits / 8


def run_hours(
    exchange: Exchange, steps: int, step_seconds: float, link: Link, assume: Assumption
) -> float:
    """Hours of a whole run of `steps` inner steps."""
    rounds = steps / exchange.interval
    return rounds * round_seconds(exchange, step_seconds, link, assume) / 3600
