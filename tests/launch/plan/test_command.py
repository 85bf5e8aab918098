"""`python -m launch plan`: its figures, its search and its refusals."""

import json

import pytest

import launch.__main__ as launch
from launch.plan.link import Exchange, Link
from launch.plan.proposal import propose
from launch.plan.search import USABLE_MEMORY
from pretrain.config import load
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, train

FP8 = ["15b", "model.implementation=transformer_engine", "fp8.format=hybrid"]


def plan(capfd, *arguments: str) -> list[dict]:
    assert launch.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def refusal(capfd, *arguments: str) -> str:
    assert launch.main(["plan", *arguments]) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert len(errors.splitlines()) == 1
    return errors


def test_a_small_model_and_a_long_round_are_told_in_numbers_that_can_be_read(capfd):
    assert launch.main(["plan", "demo"]) == 0
    output = capfd.readouterr().out
    assert "demo (1.07M parameters)" in output
    assert "0.66M tokens" in output
    assert launch.main(["plan", "15b", "--link", "1gbit"]) == 0
    assert "a round of 1,4" in capfd.readouterr().out


def test_figures_of_15b_on_its_own_gpus(capfd):
    (found,) = plan(capfd, "15b", "--link", "10gbit")
    assert found["gpus"] == 128
    assert found["parameters"] == 15_229_089_792
    assert found["budget"]["tokens"] == pytest.approx(304.8e9, rel=1e-3)
    # 2·15/16 of all values in FP32.
    assert found["link"]["bytes_per_round"] == pytest.approx(15_229_089_792 * 4 * 2 * 15 / 16)
    step = found["step_seconds"]["expected"]
    seconds = found["link"]["bytes_per_round"] * 8 / 10e9
    assert found["link"]["utilisation"] == pytest.approx(
        30 * step / (30 * step + seconds), rel=1e-3
    )
    hours = 36_330 * step / found["link"]["utilisation"] / 3600
    assert found["budget"]["hours_expected"] == pytest.approx(hours)
    assert found["budget"]["gpu_hours"] == pytest.approx(128 * hours)


def test_screen_says_memory_time_link_and_budget(capfd):
    assert launch.main(["plan", "15b", "--gpus", "256"]) == 0
    text = capfd.readouterr().out
    for word in ("dp=2", "peak", "inner step", "MFU", "utilisation", "proposed", "GPU-hours"):
        assert word in text
    assert launch.main(["plan", "15b", "--gpu", "l40s"]) == 0
    assert "does not fit" in capfd.readouterr().out


def test_search_finds_layouts_that_fit_and_use_every_gpu(capfd):
    found = plan(capfd, "15b", "parallel.replicas=2", "--gpus", "16", "--search")
    assert len(found) > 1
    for candidate in found:
        layout = candidate["layout"]
        assert layout["replicas"] == 2
        assert 2 * layout["tp"] * layout["pp"] * layout["dp"] == 16
        most = max(stage["peak"] for stage in candidate["memory"])
        assert most <= USABLE_MEMORY * candidate["gpu"]["memory_bytes"]
    times = [candidate["step_seconds"]["expected"] for candidate in found]
    assert times == sorted(times)
    # What it found is a layout that the program takes.
    options = [f"parallel.{name}={found[0]['layout'][name]}" for name in ("tp", "pp", "dp")]
    sequence = "parallel.sequence_parallel=" + str(found[0]["layout"]["tp"] > 1).lower()
    load("15b", ["parallel.replicas=2", *options, sequence])


def test_search_that_finds_nothing_says_what_is_missing(capfd):
    assert "leanest layout needs" in refusal(
        capfd, "15b", "parallel.replicas=1", "--gpus", "2", "--search"
    )
    assert "no layout divides" in refusal(capfd, "15b", "--gpus", "17", "--search")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["15b", "--gpus", "100"], "no multiple of the 128 GPUs"),
        (["15b", "--gpus", "256", "parallel.dp=1"], "leave one of the two out"),
        (["15b", "--gpus", "0"], "--gpus 0"),
        (["15b", "--link", "fast"], "as in 10gbit"),
        (["15b", "--link", "0gbit"], "--link 0gbit"),
        (["15b", "--target", "2"], "--target 2"),
        (["15b", "--island", "0"], "--island 0: must be positive"),
        (["15b", "--island", "4"], "no number of replicas divides 128 GPUs"),
        ([*FP8, "--gpu", "a100"], "NVIDIA A100 has no FP8"),
        ([*FP8, "--step-seconds", "1"], "need at least 3.01 s"),
        (["15b", "--step-seconds", "1"], "an MFU of 602%"),
        (["15c"], "did you mean 15b"),
    ],
)
def test_wrong_use_is_one_line(arguments, message, capfd):
    assert message in refusal(capfd, *arguments)


def test_proposal_prefers_what_costs_no_loss():
    exchange = Exchange(15e9, 54, bits=32, interval=30, replicas=16)
    fast, slow = (propose(exchange, 20.0, Link(g), "measured", 0.95) for g in (100, 10))
    assert fast == exchange
    assert (slow.bits, slow.interval, slow.fragments, slow.delay) == (8, 30, 1, 0)
    assert propose(exchange, 20.0, Link(1), "measured", 0.95).interval == 30
    assert propose(exchange, 20.0, Link(1e-4), "measured", 0.95) is None


@pytest.mark.parametrize(("island", "replicas"), [(8, 16), (24, 8), (64, 2), (128, 1)])
def test_as_few_replicas_are_proposed_as_fast_networks_hold(island, replicas, capfd):
    (found,) = plan(capfd, "15b", "--link", "1gbit", "--island", str(island))
    assert found["link"]["proposal"]["replicas"] == replicas
    options = found["link"]["options"]
    assert (f"parallel.replicas={replicas}" in options) == (replicas != 16)
    # What is proposed is a run that the program takes, and reaches what it promises.
    (after,) = plan(capfd, "15b", *options, "--link", "1gbit", "--gpus", "128")
    assert after["link"]["utilisation"] > found["link"]["target"] - 0.01
    assert after["layout"]["replicas"] == replicas


def test_screen_says_what_another_number_of_replicas_needs(capfd):
    assert launch.main(["plan", "15b", "--island", "64", "--link", "1gbit"]) == 0
    text = capfd.readouterr().out
    assert "K=2, H=30" in text and "parallel.replicas=2" in text
    assert "another K needs another optimizer.weight_decay" in text


def test_fp8_is_faster_by_its_layers_alone_and_mfu_stays_of_the_bf16_peak(capfd):
    (bf16,), (fp8,) = plan(capfd, "15b"), plan(capfd, *FP8)
    assert fp8["of_fp8_peak"] == pytest.approx(fp8["mfu"] * 989 / 1979)
    assert bf16["of_fp8_peak"] is None
    gain = bf16["step_seconds"]["compute"] / fp8["step_seconds"]["compute"]
    assert fp8["mfu"] > bf16["mfu"] and 1.2 < gain < 2 * 0.68
    # Emulation only rounds, and layers left in BF16 gain nothing.
    (emulated,) = plan(capfd, "15b", "fp8.format=hybrid", "fp8.backend=emulate")
    (none,) = plan(capfd, *FP8, "fp8.first_last_layers_bf16=27")
    for found in (emulated, none):
        assert found["step_seconds"]["compute"] == pytest.approx(bf16["step_seconds"]["compute"])


def test_planned_bytes_of_a_round_are_those_that_a_run_counts(tmp_path, capfd):
    blend = write_corpus(tmp_path)
    layout = {"parallel__replicas": 2, "parallel__tp": 2, "outer__interval": 2, "train__steps": 2}
    train(blend, tmp_path / "run", **layout)
    capfd.readouterr()
    (found,) = plan(capfd, str(tmp_path / "run/config.yaml"))
    (counted,) = lines(tmp_path / "run", "rounds")
    assert counted["bytes_sent"] == pytest.approx(found["link"]["bytes_per_round"])
