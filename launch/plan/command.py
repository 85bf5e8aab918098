"""`python -m launch plan`: what a run will need, on one screen."""

import argparse
import json
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from launch.plan.link import (
    ASSUMPTIONS,
    Assumption,
    Exchange,
    Link,
    bytes_per_round,
    round_seconds,
    utilisation,
)
from launch.plan.memory import RankMemory
from launch.plan.proposal import fewest_replicas, options_of, propose
from launch.plan.search import Candidate, changed, evaluate, search
from megatron_ext import host
from megatron_ext.diloco.units import units_of
from megatron_ext.errors import ConfigError
from megatron_ext.model.logical import logical_shapes
from megatron_ext.muon.views import total_numel
from pretrain import exit
from pretrain.config import Resolved, load
from pretrain.flops import DEVICES, Device, flops_per_token
from pretrain.settings import RunConfig

_UNITS_GBIT = {"mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}


@dataclass(frozen=True)
class Request:
    """What the command line asks for, besides the recipe."""

    device: Device
    gpus: int
    link: Link
    assume: Assumption
    step_seconds: float | None  # measured, in place of the predicted time
    target: float  # utilisation that a proposal must reach
    search: bool
    island: int | None  # GPUs that one fast network joins, for a proposed number of replicas


def parser() -> exit.Parser:
    """The command line of `launch plan`."""
    parser = exit.Parser(prog="python -m launch plan", description=__doc__)
    add = parser.add_argument
    add(
        "--gpus", type=int, metavar="N", help="GPUs in all; sets parallel.dp; default: the layout's"
    )
    add("--gpu", choices=DEVICES, default="h100", help="which (default h100)")
    add("--link", default="10gbit", metavar="RATE", help="of a replica, as 10gbit (the default)")
    add("--latency-ms", type=float, default=1.0, help="of that link, one way (default 1)")
    add("--assume", choices=ASSUMPTIONS, default="measured", help="whose model of the link")
    add("--step-seconds", type=float, metavar="S", help="a measured inner step, if there is one")
    add("--island", type=int, metavar="N", help="GPUs of one fast network: propose K for them")
    add("--target", type=float, default=0.95, help="compute utilisation to reach (default 0.95)")
    add("--search", action="store_true", help="look for the fastest layouts that fit")
    add("--json", action="store_true", help="print JSON")
    return parser


def run(options: argparse.Namespace) -> None:
    """Predict, and print. Raises ConfigError for what cannot be planned."""
    from launch.plan import screen

    resolved = load(options.recipe, options.overrides)
    request = _request(options, resolved.config)
    host.prepare()
    if request.search:
        candidates = search(resolved.config, request.gpus, request.device)
    else:
        candidates = [evaluate(_with_gpus(resolved, request.gpus), request.device)]
    predictions = [predict(candidate, request) for candidate in candidates]
    if options.json:
        print(json.dumps(predictions, indent=1))
    else:
        screen.show(predictions, options)


def predict(candidate: Candidate, request: Request) -> dict[str, Any]:
    """Everything that the plan says of one layout, as JSON holds it; bytes and seconds."""
    config = candidate.config
    step = request.step_seconds or candidate.step.expected
    speed = config.tokens_per_step / step
    flops = flops_per_token(config.model)
    mfu = speed * flops / request.gpus / request.device.bf16_flops
    of_peak = mfu * request.device.bf16_flops / request.device.peak_flops(config.fp8)
    if of_peak > 1:
        raise ConfigError(
            f"--step-seconds {step:g} would be an MFU of {mfu:.0%}, which no GPU reaches; "
            f"{request.gpus} of them need at least {of_peak * step:.3g} s"
        )
    return {
        "layout": config.parallel.model_dump()
        | config.train.model_dump(include={"micro_batch", "global_batch", "recompute"}),
        "gpus": request.gpus,
        "gpu": asdict(request.device),
        "parameters": parameters(config),
        "memory": [
            {"stage": stage.stage, "rank": [stage.tp_rank, stage.dp_rank]}
            | asdict(stage.memory)
            | {"peak": stage.memory.peak}
            for stage in candidate.stages
        ],
        "flops_per_token": flops,
        "tokens_per_step": config.tokens_per_step,
        "step_seconds": asdict(candidate.step) | {"used": step},
        "tokens_per_second_per_gpu": speed / request.gpus,
        "mfu": mfu,  # of the BF16 peak, also of a run in FP8
        "of_fp8_peak": of_peak if config.fp8.enabled else None,
        "link": _link(config, step, request),
        "budget": _budget(candidate, request),
    }


def _link(config: RunConfig, step: float, request: Request) -> dict[str, Any]:
    exchange = exchange_of(config, request.assume)
    share = utilisation(exchange, step, request.link, request.assume)
    cheaper = _proposal(config, exchange, step, request)
    # FP32 gradients go, and weights in the model's precision come back.
    bits = 24 if config.train.precision == "bf16" else 32
    without = replace(exchange, bits=bits, interval=1, fragments=1, delay=0)
    return {
        **asdict(request.link),
        "assume": request.assume,
        "exchange": asdict(exchange),
        "bytes_per_round": bytes_per_round(exchange),
        "round_seconds": round_seconds(exchange, step, request.link, request.assume),
        "utilisation": share,
        "utilisation_of_data_parallelism": utilisation(without, step, request.link, request.assume),
        "target": request.target,
        "proposal": asdict(cheaper) if cheaper else None,
        "options": options_of(cheaper, exchange) if cheaper else [],
    }


def _proposal(
    config: RunConfig, exchange: Exchange, step: float, request: Request
) -> Exchange | None:
    if request.island:
        replicas = fewest_replicas(config, request.gpus, request.island)
        exchange = replace(exchange, replicas=replicas)
        if replicas == 1:  # and nothing crosses the link
            return exchange
    return propose(exchange, step, request.link, request.assume, request.target)


def _budget(candidate: Candidate, request: Request) -> dict[str, float]:
    """Hours to the recipe's last step: low, expected, high; everything between steps included."""
    config = candidate.config
    exchange = exchange_of(config, request.assume)
    times = candidate.step
    steps = {"low": times.low, "expected": times.expected, "high": times.high}
    if request.step_seconds:
        steps = dict.fromkeys(steps, request.step_seconds)
    hours = {
        name: config.train.steps
        * step
        / utilisation(exchange, step, request.link, request.assume)
        / 3600
        for name, step in steps.items()
    }
    return {
        "tokens": config.train.steps * config.tokens_per_step,
        **{f"hours_{name}": value for name, value in hours.items()},
        "gpu_hours": hours["expected"] * request.gpus,
    }


def exchange_of(config: RunConfig, assume: Assumption) -> Exchange:
    """What the configured outer loop sends; the papers' models suppose 16 bits without a codec."""
    outer, bits = config.outer, _bits_a_value(config)
    return Exchange(
        parameters(config),
        config.model.layers,
        bits=bits if assume == "measured" else min(16, bits),
        interval=max(1, outer.interval),
        fragments=outer.fragments,
        delay=outer.delay,
        replicas=config.parallel.replicas,
        gather=outer.exchange == "gather",
    )


def _bits_a_value(config: RunConfig) -> float:
    """Bits on the wire for each parameter, side information included."""
    shapes = logical_shapes(config.model).items()
    units = [unit for name, shape in shapes for unit in units_of(name, shape)]
    codecs = config.outer.codecs_of(units)
    total = sum(codec.nbytes(unit.size) for codec, unit in zip(codecs, units, strict=True))
    return 8 * total / parameters(config)


def parameters(config: RunConfig) -> int:
    """Parameters of the whole model."""
    return total_numel(list(logical_shapes(config.model).values()))


def parse_gbit(text: str) -> float:
    """Gbit/s of a text such as 10gbit or 800mbit."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([mgt]bit)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--link {text}: give a number and mbit, gbit or tbit, as in 10gbit")
    return float(match[1]) * _UNITS_GBIT[match[2]]


def _request(options: argparse.Namespace, config: RunConfig) -> Request:
    if not 0 < options.target < 1:
        raise ConfigError(f"--target {options.target:g}: must lie between 0 and 1")
    for name in ("gpus", "island", "step_seconds", "latency_ms"):
        value = getattr(options, name)
        if value is not None and (value < 0 or (value == 0 and name != "latency_ms")):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be positive")
    return Request(
        device=DEVICES[options.gpu],
        gpus=options.gpus or config.parallel.world_size,
        link=Link(parse_gbit(options.link), options.latency_ms / 1e3),
        assume=options.assume,
        step_seconds=options.step_seconds,
        target=options.target,
        search=options.search,
        island=options.island,
    )


def _with_gpus(resolved: Resolved, gpus: int) -> RunConfig:
    """The configuration with data parallelism over all GPUs."""
    config = resolved.config
    if gpus == config.parallel.world_size:
        return config
    each = config.parallel.world_size // config.parallel.dp
    if resolved.origins["parallel.dp"] != "default":
        raise ConfigError(
            f"--gpus {gpus}: parallel.dp={config.parallel.dp} gives "
            f"{config.parallel.world_size} GPUs; leave one of the two out"
        )
    if gpus % each:
        raise ConfigError(
            f"--gpus {gpus} is no multiple of the {each} GPUs that parallel.replicas × tp × pp × "
            "cp take; change one of these, or let --search find a layout"
        )
    return changed(config, {"parallel": {"dp": gpus // each}})


MEMORY_CATEGORIES = [field.name for field in fields(RankMemory)]
