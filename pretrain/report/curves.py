"""A run's curves as SVG, with all runs in each."""

import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

Record = dict[str, Any]

# Okabe and Ito's colours, which colour-blind people can tell apart; black and yellow left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Readable on white and on black.
_GREY = "#808080"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "curves",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY
    ),
}


@dataclass(frozen=True)
class Curve:
    """One quantity of every run over the tokens trained on."""

    title: str
    file: str  # the records it is in
    value: Callable[[Record], float | None]  # None: not in this record
    log: bool = False
    marker: str = ""
    total: bool = False  # added up from the start


def _key(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.get(name)


CURVES = (
    Curve("training loss, nats a token", "metrics", _key("loss")),
    Curve("held-out loss of the global weights", "validation", _key("loss"), marker="o"),
    Curve("gradient norm before clipping", "metrics", _key("grad_norm"), log=True),
    Curve("learning rate", "metrics", _key("lr")),
    Curve("tokens/s, all replicas", "metrics", _key("tokens_per_second")),
    Curve("model FLOPs utilisation", "metrics", _key("mfu")),
    Curve("cosine between replicas' pseudogradients", "rounds", _key("cosine"), marker="."),
    Curve("drift ‖θ_replica − θ‖ / ‖θ‖", "rounds", _key("drift"), marker="."),
    Curve("norm of the mean pseudogradient", "rounds", _key("pseudogradient_norm"), marker="."),
    Curve("compression error, relative", "rounds", _key("compression_error"), marker="."),
    Curve("error feedback ‖e‖ / ‖Δ‖", "rounds", _key("error_ratio"), marker="."),
    Curve("bytes sent by a replica", "rounds", _key("bytes_sent"), total=True),
    Curve("seconds that training stood still", "rounds", _key("exposed_seconds"), marker="."),
)


def draw(runs: Sequence[Callable[[str], list[Record]]]) -> Iterable[tuple[str, str]]:
    """(title, SVG) of each curve that some run has. `runs`: for each its records by file name."""
    for curve in CURVES:
        series = [_series(curve, records(curve.file), records("metrics")) for records in runs]
        # Zero throughout says that the run has no such thing, as no error feedback.
        if any(any(values) for _, values in series):
            yield curve.title, _figure(curve, series)


def _series(
    curve: Curve, records: list[Record], metrics: list[Record]
) -> tuple[list[float], list[float]]:
    """Tokens trained on, and values. Rounds know their step alone, and a step's tokens may change
    at a resume; so the tokens are those that metrics have at the step."""
    found = [(record["step"], curve.value(record)) for record in records]
    found = [(step, value) for step, value in found if value is not None]
    steps, values = [step for step, _ in found], [value for _, value in found]
    known = {0: 0} | {record["step"]: record["tokens"] for record in metrics}
    tokens = np.interp(steps, list(known), list(known.values())).tolist()
    return tokens, list(itertools.accumulate(values)) if curve.total else values


def _figure(curve: Curve, series: list[tuple[list[float], list[float]]]) -> str:
    with rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 2.9), layout="constrained")
        axes: Axes = figure.subplots()
        for (tokens, values), colour in zip(series, itertools.cycle(COLOURS), strict=False):
            axes.plot(tokens, values, color=colour, linewidth=1.2, marker=curve.marker)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if curve.log:
            axes.set_yscale("log")
        elif max(value for _, values in series for value in values) >= 10_000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
