"""The plan as a person reads it."""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.plan.command import MEMORY_CATEGORIES
from launch.plan.search import USABLE_MEMORY

_WIDTH = 100
_LAYOUT = ("replicas", "tp", "pp", "cp", "dp", "ep", "micro_batch", "recompute")
# Weight decay is proportional to a replica's batch; outer values as published (arXiv 2505.23725).
_OTHER_REPLICAS = (
    "another K needs another optimizer.weight_decay, ∝ 1/K, and outer.lr and momentum: "
    "0.7 and 0.6 at K=1, 0.9 and 0.8 at 8, 1.0 and 0.9 at 16"
)


def show(predictions: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print one layout in full, or a table of several and the best of them in full."""
    console = Console(highlight=False, width=_WIDTH, soft_wrap=True)
    best = predictions[0]
    device = best["gpu"]
    console.print(
        f"[bold]{options.recipe}[/] ({_count(best['parameters'])} parameters) on "
        f"{best['gpus']} × {options.gpu}: {device['bf16_flops'] / 1e12:.0f} TFLOP/s dense BF16, "
        f"{device['memory_bytes'] / 1e9:.0f} GB ({device['source']})"
    )
    if options.search:
        _show_layouts(console, predictions)
    layout = best["layout"]
    console.print(
        "\n[bold]layout[/]  "
        + ", ".join(f"{name}={layout[name]}" for name in _LAYOUT)
        + f"; {best['tokens_per_step']:,} tokens a step"
    )
    _show_memory(console, best)
    _show_time(console, best)
    if best["layout"]["replicas"] > 1 or options.island:
        _show_link(console, best)
    _show_budget(console, best)


def _show_layouts(console: Console, predictions: list[dict[str, Any]]) -> None:
    table = Table(*_LAYOUT, "fullest rank", "step", "MFU", "hours", box=None, pad_edge=False)
    for prediction in predictions:
        peak = max(stage["peak"] for stage in prediction["memory"])
        table.add_row(
            *(str(prediction["layout"][name]) for name in _LAYOUT),
            f"{peak / 1e9:.0f} GB",
            f"{prediction['step_seconds']['expected']:.3g} s",
            f"{prediction['mfu']:.0%}",
            f"{prediction['budget']['hours_expected']:,.0f}",
        )
    console.print("\n[bold]the fastest layouts that fit[/]")
    console.print(table)


def _show_memory(console: Console, prediction: dict[str, Any]) -> None:
    stages = prediction["memory"]
    table = Table("GB of the fullest rank", box=None, pad_edge=False)
    # Stages in the middle of a long pipeline are alike.
    shown = stages if len(stages) <= 4 else [stages[0], stages[1], stages[-1]]
    for stage in shown:
        table.add_column(f"stage {stage['stage']}", justify="right")
    for name in MEMORY_CATEGORIES:
        if any(stage[name] for stage in shown):
            table.add_row(name.replace("_", " "), *(f"{stage[name] / 1e9:.2f}" for stage in shown))
    memory = prediction["gpu"]["memory_bytes"]
    table.add_row("[bold]peak", *(f"[bold]{_of(stage['peak'], memory)}" for stage in shown))
    console.print()
    console.print(table)
    if max(stage["peak"] for stage in stages) > USABLE_MEMORY * memory:
        console.print(
            f"[red]does not fit[/]: a plan may use {USABLE_MEMORY:.0%} of {memory / 1e9:.0f} GB; "
            "--search looks for a layout that does"
        )


def _of(peak: int, memory: int) -> str:
    colour = "green" if peak <= USABLE_MEMORY * memory else "red"
    return f"[{colour}]{peak / 1e9:.2f}[/]"


def _show_time(console: Console, prediction: dict[str, Any]) -> None:
    step = prediction["step_seconds"]
    parts = [name for name in step if name not in ("low", "expected", "high", "used")]
    if not step["expert_parallel"]:
        parts.remove("expert_parallel")
    inside = ", ".join(f"{name.replace('_', ' ')} {step[name]:.3g}" for name in parts)
    console.print(
        f"\n[bold]inner step[/]  {step['expected']:.3g} s, from {step['low']:.3g} to "
        f"{step['high']:.3g} ({inside})"
    )
    if step["used"] != step["expected"]:
        console.print(f"            what follows uses the given {step['used']:.3g} s")
    of_fp8 = prediction["of_fp8_peak"]
    peaks = f" of the BF16 peak, {of_fp8:.0%} of FP8's" if of_fp8 else ""
    console.print(
        f"            {prediction['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, MFU "
        f"{prediction['mfu']:.0%}{peaks}, {prediction['flops_per_token'] / 1e9:.1f} GFLOP a token"
    )


def _show_link(console: Console, prediction: dict[str, Any]) -> None:
    link = prediction["link"]
    exchange = link["exchange"]
    console.print(
        f"\n[bold]link[/]        {link['gbit']:g} Gbit/s, {link['latency_seconds'] * 1e3:g} ms; "
        f"assuming: {link['assume']}\n"
        f"            {_synchronisation(exchange)}: a replica sends "
        f"{link['bytes_per_round'] / 1e9:.3g} GB a round of {_digits(link['round_seconds'])} s\n"
        f"            compute utilisation {link['utilisation']:.1%}; gradients of every step over "
        f"this link would leave {link['utilisation_of_data_parallelism']:.1%}"
    )
    proposal = link["proposal"]
    if proposal is None:
        text = (
            f"nothing tried reaches {link['target']:.0%}; a faster link or larger batch must help"
        )
    elif proposal == exchange:
        text = f"as it is: {link['target']:.0%} is reached"
    elif proposal["replicas"] == 1:
        text = f"K=1: nothing crosses the link; {' '.join(link['options'])}"
    else:
        text = f"{_synchronisation(proposal)} reaches {link['target']:.0%}"
        text += f"; {' '.join(link['options'])}"
    console.print(f"            proposed: {text}")
    if proposal and proposal["replicas"] != exchange["replicas"]:
        console.print(f"            {_OTHER_REPLICAS}")


def _count(number: float) -> str:
    """Like 15.23B or 1.07M."""
    size, unit = (1e9, "B") if number >= 1e9 else (1e6, "M")
    return f"{number / size:,.2f}{unit}"


def _digits(number: float) -> str:
    """Three of them, and all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _synchronisation(exchange: dict[str, Any]) -> str:
    return (
        f"K={exchange['replicas']}, H={exchange['interval']}, P={exchange['fragments']}, "
        f"τ={exchange['delay']}, {exchange['bits']:.3g} bits"
    )


def _show_budget(console: Console, prediction: dict[str, Any]) -> None:
    budget = prediction["budget"]
    console.print(
        f"\n[bold]to the end[/]  {_count(budget['tokens'])} tokens in "
        f"{budget['hours_expected']:,.1f} h, from {budget['hours_low']:,.1f} to "
        f"{budget['hours_high']:,.1f}; {budget['gpu_hours']:,.0f} GPU-hours\n"
        "[dim]Memory of state is exact, activations and times are estimates; validation and "
        "checkpoints come on top.[/]"
    )
