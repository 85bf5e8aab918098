"""A run that was stopped and resumed is the run that was not."""

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint.saved import Saved
from megatron_ext.errors import ConfigError
from pretrain.config import load
from pretrain.session import open_session
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, STREAMING, lines, losses, train
from tests.ranks import run

STEPS = 10
INTERVAL = 4


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def check_equal(left: list[dict], right: list[dict]) -> None:
    for one, other in zip(left, right, strict=True):
        for (block, mine), (_, theirs) in zip(one["masters"], other["masters"], strict=True):
            assert torch.equal(mine, theirs), block.name
        assert torch.equal(one["anchor"], other["anchor"])


def without_seconds(line: dict) -> dict:
    return {k: v for k, v in line.items() if "second" not in k}


def check_straight_equals_stopped(blend, tmp_path, stops: list[int], **options) -> None:
    options |= {"train__steps": STEPS, "validation__every": 5}
    straight = train(blend, tmp_path / "straight", **options)
    for stop in stops:
        train(blend, tmp_path / "stopped", train__stop_at=stop, **options)
    stopped = train(blend, tmp_path / "stopped", **options)
    check_equal(straight, stopped)
    rounds = ["rounds"] if options.get("outer__interval") else []
    for name in ["metrics", "validation", *rounds]:
        one, other = (lines(tmp_path / folder, name) for folder in ("straight", "stopped"))
        assert [without_seconds(line) for line in one] == [without_seconds(line) for line in other]
    resumed = [line for line in lines(tmp_path / "stopped", "events") if line["event"] == "resume"]
    assert [line["step"] for line in resumed] == stops


def test_stopping_before_at_and_after_a_rounds_end_and_inside_it_changes_no_bit(blend, tmp_path):
    layout = {"parallel__replicas": 2, "parallel__tp": 2}
    stops = [2, INTERVAL - 1, INTERVAL, INTERVAL + 1]
    check_straight_equals_stopped(blend, tmp_path, stops, outer__interval=INTERVAL, **layout)


def test_fragments_in_flight_and_error_feedback_resume_bit_for_bit(blend, tmp_path):
    options = {
        "parallel__replicas": 2,
        "outer__interval": INTERVAL,
        "outer__second_error_feedback": True,
    }
    options |= STREAMING
    check_straight_equals_stopped(blend, tmp_path, [2, 5, 6], **options)


def test_bf16_adamw_on_data_parallel_ranks_resumes_bit_for_bit(blend, tmp_path):
    options = {"train__precision": "bf16", "optimizer__name": "adamw", "parallel__dp": 2}
    check_straight_equals_stopped(blend, tmp_path, [3], **options)


def test_primal_averaging_resumes_bit_for_bit(blend, tmp_path):
    options = {"optimizer__averaging__decay": 0.9, "parallel__tp": 2}
    check_straight_equals_stopped(blend, tmp_path, [3], **options)
    saved = Saved(tmp_path / "straight/checkpoints/step-00000010")
    assert saved.global_folder == ("replica-0", "average")


def test_experts_shared_out_over_tensor_and_data_parallel_ranks_resume_bit_for_bit(blend, tmp_path):
    layout = {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__dp": 2}
    layout |= {"parallel__ep": 2, "model__experts": 4}
    check_straight_equals_stopped(blend, tmp_path, [3], train__overlap=True, **layout)


def test_sequence_parallelism_resumes_bit_for_bit_instead_of_crashing(blend, tmp_path):
    layout = {"parallel__tp": 2, "parallel__sequence_parallel": True}
    check_straight_equals_stopped(blend, tmp_path, [3], **layout)


@pytest.mark.slow
def test_pipeline_stages_and_overlap_resume_bit_for_bit(blend, tmp_path):
    options = {"parallel__pp": 2, "parallel__interleave": 2, "parallel__dp": 2}
    check_straight_equals_stopped(
        blend, tmp_path, [6], outer__interval=INTERVAL, train__overlap=True, **options
    )


def test_a_run_that_lost_steps_after_its_checkpoint_records_each_step_once(blend, tmp_path):
    """As after a kill: metrics reach further than the checkpoint."""
    train(blend, tmp_path, train__stop_at=4)
    metrics = tmp_path / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(metrics.read_text().splitlines()[-1].replace('"step": 4', '"step": 5') + "\n")
        file.write('{"step": 6, "los')
    train(blend, tmp_path)
    assert [line["step"] for line in lines(tmp_path, "metrics")] == list(range(1, STEPS + 1))


def test_options_that_changed_are_told_and_recorded(blend, tmp_path, capfd):
    train(blend, tmp_path, train__stop_at=4)
    train(blend, tmp_path, optimizer__lr=0.01, train__micro_batch=2)
    (resume,) = [line for line in lines(tmp_path, "events") if line["event"] == "resume"]
    rates = {line["step"]: line["lr"] for line in lines(tmp_path, "metrics")}
    assert resume["changed"] == {
        "train.micro_batch": [4, 2],
        "optimizer.lr": [0.02, 0.01],
        "learning rate of step 5": [2 * rates[5], rates[5]],
    }
    said = capfd.readouterr().out
    assert re.search(r"checkpoint +requested +effective +because", said)
    assert re.search(r"optimizer.lr +0.02 +0.01 +0.01 +from the next step on", said)


def _accept_without(rank: int, overrides: list[str], unknown: str) -> list:
    with open_session(load("demo", overrides)) as session:
        counters = json.loads(json.dumps(session.state.counters()))
        options = counters["options"]
        counters["options"] = {n: v for n, v in options.items() if not n.startswith(unknown)}
        assert counters["options"] != options
        session.state.accept(counters, Path("older"))
        return session.state.findings


@pytest.mark.parametrize("unknown", ["model.experts", "optimizer.rules"])
def test_an_option_that_a_checkpoint_does_not_know_yet_had_its_default(blend, tmp_path, unknown):
    values = SMALL | {"data.blend": blend, "run.dir": tmp_path}
    overrides = [f"{key}={value}" for key, value in values.items()]
    assert run(_accept_without, 1, overrides, unknown) == [[]]


def test_a_model_that_computes_otherwise_is_refused_though_its_shapes_fit(blend, tmp_path):
    train(blend, tmp_path, train__stop_at=4)
    with pytest.raises(ConfigError, match=r"rope_base is 20000 and was 500000.*resume.allow=\["):
        train(blend, tmp_path, model__rope_base=20000)
    train(blend, tmp_path, model__rope_base=20000, resume__allow="[model.rope_base]")
    assert len(losses(tmp_path)) == STEPS


def test_a_longer_run_goes_on_with_the_samples_it_would_have_had(blend, tmp_path):
    """The schedule is constant, so nothing but the order of samples depends on the length."""
    options = {"optimizer__schedule": "constant", "optimizer__warmup_steps": 1}
    train(blend, tmp_path / "straight", train__steps=8, **options)
    train(blend, tmp_path / "longer", train__steps=4, **options)
    train(blend, tmp_path / "longer", train__steps=8, **options)
    assert losses(tmp_path / "longer") == losses(tmp_path / "straight")


def test_weights_alone_begin_a_new_run_of_another_method(blend, tmp_path, capfd):
    """From a data-parallel AdamW run into MuLoCo, on another layout."""
    adamw = {"optimizer__name": "adamw", "optimizer__lr": 0.005}
    train(blend, tmp_path / "old", train__steps=8, parallel__tp=2, **adamw)
    muloco = {"parallel__replicas": 2, "outer__interval": 2, "train__steps": 2}
    train(blend, tmp_path / "new", resume__weights=tmp_path / "old", **muloco)
    assert "step, optimizer and data begin anew" in capfd.readouterr().out
    (start,) = [line for line in lines(tmp_path / "new", "events") if line["event"] == "start"]
    assert start["weights"] == str(tmp_path / "old/checkpoints/step-00000008")
    old, new = losses(tmp_path / "old"), losses(tmp_path / "new")
    assert new[0] < old[4] < old[0]
    # The same command again goes on with the run, not with the weights.
    train(blend, tmp_path / "new", resume__weights=tmp_path / "old", **muloco)
    assert "nothing to do" in capfd.readouterr().out


def test_weights_of_another_model_are_refused_by_the_tensors_name(blend, tmp_path):
    train(blend, tmp_path / "old", train__steps=1)
    with pytest.raises(ConfigError, match=r"do not fit this model: .*mlp.down is \[64, 96\]"):
        train(blend, tmp_path / "new", resume__weights=tmp_path / "old", model__ffn=128)


def test_another_runs_checkpoint_is_refused_where_a_run_already_is(blend, tmp_path):
    for name in "ab":
        train(blend, tmp_path / name, train__stop_at=4)
    other = tmp_path / "a/checkpoints/step-00000004"
    with pytest.raises(ConfigError, match=r"but run\.dir holds checkpoints, up to .*00000004"):
        train(blend, tmp_path / "b", resume=other)
    train(blend, tmp_path / "c", resume=other)
    assert [line["step"] for line in lines(tmp_path / "c", "metrics")] == [5, 6, 7, 8, 9, 10]


def test_a_run_that_is_there_already_says_so(blend, tmp_path, capfd):
    train(blend, tmp_path, train__stop_at=4)
    train(blend, tmp_path, train__stop_at=4)
    assert "nothing to do: the run is there already" in capfd.readouterr().out
