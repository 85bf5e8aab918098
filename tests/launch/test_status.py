"""`python -m launch status` on the folder of a real run, and on logs of ranks that failed."""

import json
import os

import pytest

import launch.__main__ as launch
from pretrain import running
from pretrain.log import RunLog
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("status")
    train(write_corpus(folder), folder / "run", train__steps=4, train__stop_at=3)
    return folder / "run"


def test_status_says_how_far_the_run_is(run_dir, capfd):
    assert launch.main(["status", str(run_dir), "--json"]) == 0
    status = json.loads(capfd.readouterr().out)
    assert (status["step"], status["steps"]) == (3, 4)
    assert status["loss"] == lines(run_dir, "metrics")[-1]["loss"]
    assert status["checkpoint"] == "step-00000003"
    assert status["event"]["event"] == "end"
    assert status["failure"] is None
    assert status["running"] is None


def test_a_run_in_progress_is_told_from_one_that_ended(run_dir, capfd):
    with running.noted(run_dir):
        assert launch.main(["status", str(run_dir)]) == 0
        assert f"in progress: process {os.getpid()} on " in capfd.readouterr().out
    assert launch.main(["status", str(run_dir)]) == 0
    assert "not in progress" in capfd.readouterr().out


def test_the_error_that_ended_the_run_is_told(run_dir, capfd):
    log = RunLog(run_dir, step=3)
    log.event("end", step=3, error="step 4: the gradient is not finite")
    log.close()
    assert launch.main(["status", str(run_dir)]) == 0
    [line] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("last event")]
    assert line.startswith("last event: end at ")
    assert line.endswith(": step 4: the gradient is not finite")


def test_first_failure_is_told_and_echoes_are_not(run_dir, capfd):
    old, new = (run_dir / f"slurm/4711/attempt-{attempt}" for attempt in (0, 1))
    texts = {
        old / "rank-3.log": "error: something of an older attempt\n",
        new / "rank-0.log": "step 1\nerror: step 7: no sign of life from replica 0 rank 2\n",
        new / "rank-2.log": "step 1\nerror: shard 7 is damaged\nerror: and so on\n",
        new / "rank-11.log": "error: a later one\n",
    }
    for age, (path, text) in enumerate(texts.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (age, age))
    os.utime(old, (0, 0))
    assert launch.main(["status", str(run_dir)]) == 0
    output = capfd.readouterr().out
    assert f"rank 2 failed: shard 7 is damaged ({new}/rank-2.log)" in output
    assert "step 3 of 4" in output


def test_folder_of_no_run_is_refused(tmp_path, capfd):
    assert launch.main(["status", str(tmp_path)]) == 2
    assert "no config.yaml" in capfd.readouterr().err
