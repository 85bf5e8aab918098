"""The published bandwidth tables and wall-clock times, from the models that lie behind them.

Sources: arXiv 2501.18512 (Streaming DiLoCo, H = 100), arXiv 2503.09799 (scaling laws for DiLoCo),
arXiv 2505.23725 (MuLoCo, wall-clock figure at 15B). Seconds of a step and numbers of layers of the
1B, 10B and 100B models are not printed there; they are part of the fit.
"""

import math

import pytest

from launch.plan.link import (
    PUBLISHED_GRID_GBIT,
    Exchange,
    Link,
    bytes_per_round,
    needed_gbit,
    round_seconds,
    run_hours,
    utilisation,
)

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
MODELS = {  # parameters, layers, seconds of a step
    "1B": (1e9, 24, 0.1),
    "10B": (10e9, 48, 0.8),
    "100B": (100e9, 108, 4.9),
    "405B": (405e9, 126, 26.0),
    "671B": (671e9, 61, 20.0),
}
STREAMING = {
    "1B": {
        "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
        "fp4": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "10B": {
        "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
        "fp4": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    "100B": {
        "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "overlap": (1.7, 3.6, 4.3, 5.2, 5.2),
        "fp4": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
SCALING_LAWS = {
    ("10B", 1): (104.8, 184.2, 222.3, 222.3, 390.7),
    ("10B", 10): (16.0, 49.4, 86.8, 152.6, 222.3),
    ("10B", 50): (3.0, 11.0, 23.3, 41.0, 126.5),
    ("10B", 100): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("10B", 300): (0.5, 2.0, 4.3, 9.1, 41.0),
    ("405B", 1): (126.5, 222.3, 268.3, 323.8, 323.8),
    ("405B", 50): (3.6, 13.3, 28.1, 59.6, 184.2),
    ("405B", 100): (2.0, 7.5, 16.0, 33.9, 126.5),
    ("405B", 300): (0.7, 3.0, 6.2, 13.3, 59.6),
    ("671B", 1): (323.8, 569.0, 686.6, 686.6, 1000.0),
    ("671B", 100): (4.3, 16.0, 41.0, 72.0, 268.3),
    ("671B", 300): (1.7, 6.2, 13.3, 28.1, 126.5),
}
WALL_CLOCK = {  # method: (inner steps, H, hours at 10 Gbit/s, hours at 6,400 Gbit/s)
    "DP Muon": (72_660, 1, 511, 20.9),
    "DP AdamW": (145_320, 1, 1015, 41),
    "MuLoCo K=1": (18_165, 1, 130, 5.2),
    "DiLoCo K=1": (290_640, 1, 2017, 81.7),
    "MuLoCo K=16": (36_330, 30, 19, 9.9),
    "DiLoCo K=16": (72_660, 30, 38.5, 19.5),
}


def grid_points(gbit: float, published: float) -> int:
    """How many points of the grid lie between a bandwidth and a published, rounded one."""
    return abs(_grid_index(gbit) - _grid_index(published))


def _grid_index(gbit: float) -> int:
    return round((math.log10(gbit) + 1) * 49 / 4)


def exchange_of(model: str, method: str, interval: int) -> Exchange:
    parameters, layers, _ = MODELS[model]
    whole = Exchange(parameters, layers, 16, interval)
    if method in ("data-parallel", "diloco"):
        return whole
    delay = 0 if method == "streaming" else 1
    bits = 4 if method == "fp4" else 16
    return Exchange(parameters, layers, bits, interval, fragments=layers // 3, delay=delay)


@pytest.mark.parametrize("method", STREAMING["1B"])
@pytest.mark.parametrize("model", STREAMING)
def test_table_of_streaming_diloco_within_one_grid_point(model, method):
    exchange = exchange_of(model, method, 1 if method == "data-parallel" else 100)
    for target, published in zip(TARGETS, STREAMING[model][method], strict=True):
        gbit = needed_gbit(exchange, MODELS[model][2], target, "streaming-diloco")
        assert grid_points(gbit, published) <= 1, (target, gbit, published)


@pytest.mark.parametrize(("model", "interval"), SCALING_LAWS)
def test_table_of_the_scaling_laws_within_two_grid_points(model, interval):
    exchange = exchange_of(model, "diloco", interval)
    for target, published in zip(TARGETS, SCALING_LAWS[model, interval], strict=True):
        gbit = needed_gbit(exchange, MODELS[model][2], target, "streaming-diloco")
        assert grid_points(gbit, published) <= 2, (target, gbit, published)


@pytest.mark.parametrize("method", WALL_CLOCK)
def test_wall_clock_of_muloco_within_15_percent(method):
    steps, interval, *published = WALL_CLOCK[method]
    exchange = Exchange(15.229e9, 54, 16, interval, replicas=16)
    for gbit, hours in zip((10, 6400), published, strict=True):
        assert run_hours(exchange, steps, 1.0, Link(gbit), "muloco") == pytest.approx(hours, 0.15)


def test_link_hides_nothing_by_itself_and_a_delay_hides_its_steps():
    link, step_seconds = Link(1.0), 2.0
    exchange = Exchange(1e9, 10, bits=8, interval=10, fragments=2, replicas=4)
    sent_seconds = bytes_per_round(exchange) * 8 / 1e9
    assert sent_seconds == pytest.approx(2 * 3 / 4 * 8)
    straight = round_seconds(exchange, step_seconds, link, "measured")
    assert straight == pytest.approx(20 + sent_seconds)
    delayed = Exchange(1e9, 10, bits=8, interval=10, fragments=2, replicas=4, delay=2)
    assert round_seconds(delayed, step_seconds, link, "measured") == pytest.approx(20 + 2 * 2)


@pytest.mark.parametrize(("gather", "messages"), [(False, 4), (True, 3)])
def test_latency_is_paid_for_each_message_of_each_fragment(gather, messages):
    exchange = Exchange(0, 10, interval=10, fragments=5, gather=gather)
    expected = 10 + 5 * messages * 0.1
    assert round_seconds(exchange, 1.0, Link(1, 0.1), "measured") == pytest.approx(expected)


def test_a_gather_sends_everything_to_each_of_the_others():
    exchange = Exchange(1e9, 10, bits=4, replicas=8, gather=True)
    assert bytes_per_round(exchange) == 7 * 1e9 / 2


def test_one_replica_waits_for_no_link():
    alone = Exchange(1e9, 10, interval=30, replicas=1)
    assert utilisation(alone, 1.0, Link(0.001, 1.0), "measured") == 1.0
    assert bytes_per_round(alone) == 0


def test_needed_bandwidth_is_the_first_that_suffices():
    exchange = Exchange(1e9, 24, interval=100)
    gbit = needed_gbit(exchange, 0.1, 0.9, "measured")
    below = PUBLISHED_GRID_GBIT[PUBLISHED_GRID_GBIT.index(gbit) - 1]
    assert utilisation(exchange, 0.1, Link(gbit), "measured") >= 0.9
    assert utilisation(exchange, 0.1, Link(below), "measured") < 0.9
    assert needed_gbit(exchange, 1e-9, 0.9, "measured") is None
