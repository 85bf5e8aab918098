"""`python -m launch stop` on real runs that are in progress, and where none is."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest

import launch.__main__ as launch
from launch import stop as launch_stop
from pretrain import running
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, lines

# More than a test waits for, and not so many that indexing their samples takes long.
STEPS = 3000


@contextmanager
def run_in_progress(folder: Path, **layout):
    """A run under `launch local`, past its third step; its folder and the launcher's process."""
    values = SMALL | {"data.blend": write_corpus(folder), "run.dir": folder / "run"}
    values |= {"train.steps": STEPS} | {k.replace("__", "."): v for k, v in layout.items()}
    options = [f"{key}={value}" for key, value in values.items()]
    log = folder / "log.txt"
    # Forked, and so spared the imports.
    process = multiprocessing.get_context("fork").Process(target=_launch, args=(options, log))
    process.start()
    metrics = folder / "run/metrics.jsonl"
    try:
        deadline = time.monotonic() + 90
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert time.monotonic() < deadline and process.is_alive(), log.read_text()
            time.sleep(0.05)
        yield folder / "run", process
    finally:
        process.kill()
        process.join()


def _launch(options: list[str], log: Path) -> None:
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(launch.main(["local", "demo", *options]))


def exit_code(process: multiprocessing.Process) -> int | None:
    """Of a launcher that is about to end."""
    process.join(60)
    return process.exitcode


def stop(folder: Path, *options: str) -> int:
    return launch.main(["stop", str(folder), *options])


def test_a_run_that_is_asked_saves_at_one_step_of_all_and_ends(tmp_path, capfd):
    with run_in_progress(tmp_path, parallel__replicas=2, outer__interval=4) as (run, process):
        assert stop(run) == 0
        assert exit_code(process) == 0
    output = capfd.readouterr().out
    end = lines(run, "events")[-1]
    name = f"step-{end['step']:08}"
    assert (end["event"], end["error"]) == ("end", None) and end["step"] < STEPS
    assert (run / "checkpoints/latest").read_text() == f"{name}\n"
    assert f"the run saves after step {end['step']} and ends" in output
    assert output.splitlines()[-1] == f"ended after {name}; the same command goes on from there"
    assert not (run / "running.json").exists() and not (run / "stop").exists()

    assert stop(run) == 0
    assert f"no run is in progress in {run}; its last checkpoint: {name}" in capfd.readouterr().out


def test_a_stopped_run_goes_on_when_started_again_and_now_ends_it_without_a_save(tmp_path, capfd):
    layout = {"parallel__replicas": 2, "outer__interval": 4}
    with run_in_progress(tmp_path, **layout) as (run, process):
        assert stop(run) == 0
        assert exit_code(process) == 0
    stopped = lines(run, "events")[-1]["step"]
    # The request of before must not end the run anew.
    with run_in_progress(tmp_path, **layout) as (run, process):
        while lines(run, "metrics")[-1]["step"] < stopped + 10:
            assert process.is_alive()
            time.sleep(0.05)
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 2
        assert stop(run, "--now") == 0
        assert exit_code(process) != 0
        assert not any(rank.is_running() for rank in ranks)
    name = f"step-{stopped:08}"
    assert (run / "checkpoints/latest").read_text() == f"{name}\n"
    assert f"goes on from the last checkpoint: {name}" in capfd.readouterr().out


def test_a_run_that_hangs_is_not_waited_for_without_end(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch_stop, "GRACE_SECONDS", 0.5)
    with run_in_progress(tmp_path) as (run, process):
        os.kill(running.read(run).pid, signal.SIGSTOP)
        assert stop(run, "--wait", "0.5") == 1
        error = capfd.readouterr().err
        assert "error: the run has not ended within 0.5 s: it has not looked since" in error
        assert len(error.splitlines()) == 1
        assert not (run / "stop").exists()
        assert stop(run, "--now") == 0
        assert exit_code(process) == 1


def test_a_run_that_fails_while_asked_is_told_with_its_reason(tmp_path, capfd):
    with run_in_progress(tmp_path) as (run, _):
        checkpoints = run / "checkpoints"
        checkpoints.rmdir()
        checkpoints.symlink_to("/proc/nowhere")  # where not even root can write
        assert stop(run) == 1
    error = capfd.readouterr().err
    assert "the run ended without a checkpoint: " in error
    assert len(error.splitlines()) == 1


@pytest.fixture
def noted(tmp_path):
    """A run's folder whose note says what a test wants of this very process."""

    def note(**changes) -> Path:
        (tmp_path / "config.yaml").write_text("train:\n  steps: 10\n")
        since = psutil.Process().create_time()
        values = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        values |= {"slurm_job": None} | changes
        (tmp_path / "running.json").write_text(json.dumps(values))
        return tmp_path

    return note


def test_a_run_whose_first_process_was_killed_is_not_in_progress(noted, capfd):
    with subprocess.Popen(["sleep", "60"]) as process:
        folder = noted(pid=process.pid, since=psutil.Process(process.pid).create_time())
        assert running.read(folder).pid == process.pid
        process.kill()
    assert stop(folder) == 0
    assert "no run is in progress" in capfd.readouterr().out


def test_a_later_process_of_the_same_number_is_not_the_run(noted, capfd):
    assert stop(noted(since=1.0)) == 0
    assert "no run is in progress" in capfd.readouterr().out


def test_a_run_on_another_machine_is_asked_and_waited_for_by_its_files(noted, capfd):
    folder = noted(host="elsewhere")
    assert stop(folder, "--wait", "0.3") == 1
    assert f"on elsewhere is gone, remove {folder}/running.json" in capfd.readouterr().err
    assert stop(folder, "--now") == 2
    assert "is on elsewhere; stop it there" in capfd.readouterr().err


def test_now_cancels_a_job_of_slurm_where_its_commands_are(noted, capfd, monkeypatch):
    folder = noted(host="elsewhere", slurm_job="4711")
    monkeypatch.setenv("PATH", str(folder))
    assert stop(folder, "--now") == 2
    assert "run `scancel 4711` where" in capfd.readouterr().err
    program = folder / "scancel"
    program.write_text(f'#!/bin/bash\necho "$@" >{folder}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    assert stop(folder, "--now") == 0
    assert (folder / "calls").read_text() == "4711\n"


def test_wrong_use_is_one_line(tmp_path, noted, capfd):
    assert stop(tmp_path) == 2
    assert "no config.yaml" in capfd.readouterr().err
    assert stop(noted(), "--wait", "0") == 2
    assert "--wait 0: must be positive" in capfd.readouterr().err
    (tmp_path / "running.json").write_text("{}")
    assert stop(tmp_path) == 3
    assert "running.json is damaged" in capfd.readouterr().err
