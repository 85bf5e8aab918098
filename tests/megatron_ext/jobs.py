"""Replicas in jobs of their own, which know nothing of each other but where they meet."""

import os
import socket
from collections.abc import Callable, Collection
from typing import Any

from tests.ranks import run


def run_jobs(
    fn: Callable[..., Any],
    replicas: int,
    ranks: int,
    *args: Any,
    may_die: Collection[tuple[int, int]] = (),
) -> list[Any]:
    """Call `fn(*args)` in a job of `ranks` processes for each replica; their results, in order.

    `may_die`: replica and rank of those whose death does not fail the test.
    """
    # The order in which jobs start does not matter: here the last replica's is the first.
    places = [(replica, rank) for replica in reversed(range(replicas)) for rank in range(ranks)]
    ports = [_free_port() for _ in range(replicas + 1)]
    dying = [places.index(place) for place in may_die]
    found = run(_in_a_job, len(places), fn, places, ranks, ports, args, may_die=dying, timeout=120)
    return [found[places.index(place)] for place in sorted(places)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _in_a_job(
    number: int,
    fn: Callable[..., Any],
    places: list[tuple[int, int]],
    ranks: int,
    ports: list[int],
    args: tuple[Any, ...],
) -> Any:
    replica, rank = places[number]
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_PORT": str(ports[replica]),
        "REPLICAS_STORE": f"127.0.0.1:{ports[-1]}",
        "FIRST_REPLICA": str(replica),
    }
    return fn(*args)
