"""How many replicas, and what they should send one another, for the GPUs and the link there are."""

from contextlib import suppress
from dataclasses import replace

from launch.plan.link import Assumption, Exchange, Link, utilisation
from launch.plan.search import changed
from megatron_ext.errors import ConfigError
from pretrain.settings import RunConfig

# Synchronisation from what costs no loss to what costs some, by published figures: 4 bits lose
# nothing measurable, streaming's curves coincide, delays and longer rounds cost (arXiv 2505.23725,
# 2501.18512).
_CHEAPER_SYNCHRONISATION = (
    {},
    {"bits": 16},
    {"bits": 8},
    {"bits": 4},
    {"bits": 4, "fragments": 3, "delay": 1},
    {"bits": 4, "fragments": 3, "delay": 2},
    {"bits": 4, "fragments": 3, "delay": 2, "interval": 60},
    {"bits": 4, "fragments": 3, "delay": 2, "interval": 120},
    {"bits": 4, "fragments": 3, "delay": 2, "interval": 240},
)


def propose(
    exchange: Exchange, seconds: float, link: Link, assume: Assumption, target: float
) -> Exchange | None:
    """The change of synchronisation that costs least loss and reaches a utilisation, if any."""
    for changes in _CHEAPER_SYNCHRONISATION:
        cheaper = replace(exchange, **changes)
        costs_more = cheaper.bits > exchange.bits or cheaper.interval < exchange.interval
        if not costs_more and utilisation(cheaper, seconds, link, assume) >= target:
            return cheaper
    return None


def fewest_replicas(config: RunConfig, gpus: int, island: int) -> int:
    """The least K with which each replica lies within `island` GPUs of one fast network.

    Fewer replicas cost less loss (at 3.1B, K = 1 to 16: 2.122, 2.127, 2.139, 2.155, 2.165 by arXiv
    2505.23725) and send less. TP, PP, CP and the batch stay. Raises ConfigError if no K works.
    """
    parallel = config.parallel
    each = parallel.tp * parallel.pp * parallel.cp
    for replicas in range(1, gpus // each + 1):
        dp, rest = divmod(gpus, replicas * each)
        if rest or dp * each > island:
            continue
        with suppress(ConfigError):
            return changed(config, {"parallel": {"replicas": replicas, "dp": dp}}).parallel.replicas
    raise ConfigError(
        f"--island {island}: no number of replicas divides {gpus} GPUs into replicas of that many "
        f"at most, with {each} for parallel.tp × pp × cp and train.global_batch="
        f"{config.train.global_batch}; change one of these"
    )


def options_of(proposal: Exchange, now: Exchange) -> list[str]:
    """The options that turn what is sent now into what is proposed."""
    options = {"parallel.replicas": "replicas", "outer.interval": "interval"}
    options |= {"outer.fragments": "fragments", "outer.delay": "delay"}
    changes = [
        f"{option}={getattr(proposal, name)}"
        for option, name in options.items()
        if getattr(proposal, name) != getattr(now, name)
    ]
    if proposal.bits != now.bits:
        codec = ["outer.codec=bf16"]
        if proposal.bits < 16:
            codec = ["outer.codec=linear", f"outer.bits={proposal.bits}"]
        changes += codec
    return changes
