"""Ranks on this machine: started, watched, and ended with one line that names the cause."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import launch.__main__ as launch
import pretrain.__main__ as pretrain
from launch import local
from launch.local import RankFailure, supervise
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.replicas import ParallelConfig, join
from pretrain import exit, loop
from pretrain.appointments import SAVE_SIGNAL
from pretrain.config import load
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL
from tests.ranks import children_left

ROOT = Path(__file__).parents[2]
PARALLEL = ParallelConfig(replicas=2, dp=2)


pytestmark = pytest.mark.usefixtures("fast_heartbeat")


@pytest.fixture(autouse=True)
def no_threads_to_fork():
    torch.set_num_threads(1)


def failure(train, debug: bool = False) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        supervise(train, PARALLEL, debug)
    assert "\n" not in str(caught.value)
    assert children_left() == []
    return caught.value


def in_rank(victim: int, act) -> callable:
    """Two collectives; `victim` calls `act` between them."""

    def train() -> None:
        with join(PARALLEL, timeout_seconds=3) as replicas:
            dist.all_reduce(torch.ones(4))
            if replicas.launcher_rank == victim:
                act()
            with replicas.guard("gradients of step 1"):
                dist.all_reduce(torch.ones(4))
            replicas.barrier("end")

    return train


def raising(error: BaseException):
    def act() -> None:
        raise error

    return act


def test_ranks_that_end_well_leave_nothing_behind(capfd):
    supervise(in_rank(0, lambda: print("once")), PARALLEL)
    assert capfd.readouterr().out == "once\n"
    assert children_left() == []


def test_killed_rank_is_named_at_once():
    started = time.monotonic()
    error = failure(in_rank(2, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert str(error).startswith("replica 1 rank 0 was killed by SIGKILL")
    assert error.exit_code == 1
    assert time.monotonic() - started < 3


def test_stopped_rank_is_named_after_the_time_out():
    error = failure(in_rank(1, lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    # Its own replica waits in the all-reduce, the other one at the barrier.
    assert re.search("(no sign of life|no word within 3 s) from replica 0 rank 1", str(error))
    assert error.exit_code == 1


def test_exit_code_and_reason_are_those_of_the_cause():
    error = failure(in_rank(3, raising(DataError("shard 7 is damaged"))))
    assert str(error) == "replica 1 rank 1: shard 7 is damaged"
    assert error.exit_code == 3


def test_same_error_of_all_ranks_is_told_once():
    def train() -> None:
        raise ConfigError("data.blend=x is not there")

    error = failure(train)
    assert str(error) == "data.blend=x is not there"
    assert error.exit_code == 2


def test_unexpected_error_has_a_traceback_only_with_debug(capfd):
    train = in_rank(1, raising(ValueError("first line\nsecond line")))
    error = failure(train)
    assert str(error) == "replica 0 rank 1: ValueError: first line (--debug shows where)"
    assert error.exit_code == 1
    assert capfd.readouterr().err == ""
    failure(train, debug=True)
    assert "Traceback" in capfd.readouterr().err


def test_processes_that_a_rank_forked_end_with_it(tmp_path):
    pid_file = tmp_path / "pid"

    def fork_and_die() -> None:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            time.sleep(600)
        pid_file.write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)

    failure(in_rank(1, fork_and_die))
    assert _ends(int(pid_file.read_text()))


def test_a_request_to_save_that_reaches_the_launcher_reaches_the_ranks():
    def train() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE_SIGNAL})
        with join(PARALLEL, timeout_seconds=30) as replicas:
            replicas.barrier("nobody would die of it")
            if replicas.launcher_rank == 1:
                os.kill(os.getppid(), SAVE_SIGNAL)
            if not signal.sigtimedwait({SAVE_SIGNAL}, 20):
                raise DataError("nothing came")

    supervise(train, PARALLEL)
    assert children_left() == []


def test_ranks_that_ignore_sigterm_are_killed(monkeypatch):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)

    def train() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        join(PARALLEL, timeout_seconds=30)
        if os.environ["LOCAL_RANK"] == "0":
            raise DataError("gone")
        time.sleep(600)

    assert str(failure(train)) == "replica 0 rank 0: gone"


@pytest.fixture
def sleeper(tmp_path):
    """A launcher in a process of its own, the ids of its two sleeping ranks, and its stderr."""
    reading, writing = os.pipe()
    errors = tmp_path / "stderr"

    def train() -> None:
        os.write(writing, b"%d\n" % os.getpid())
        time.sleep(600)

    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            with errors.open("w") as sys.stderr:
                code = exit.run(lambda: supervise(train, ParallelConfig(dp=2)))
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        yield pid, [int(pipe.readline()) for _ in range(2)], errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_the_launcher_ends_all_ranks(sleeper, number):
    pid, ranks, errors = sleeper
    os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + number
    assert errors.read_text() == f"error: stopped by {number.name}\n"
    assert all(_ends(rank) for rank in ranks)


def test_launcher_whose_ranks_end_well_when_asked_to_stop_ends_well(capfd):
    reading, writing = os.pipe()

    def train() -> None:
        asked = []
        # Once they have met, the launcher has started everything.
        join(ParallelConfig(dp=2), timeout_seconds=30)
        signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
        os.write(writing, b".")
        while not asked:
            time.sleep(0.01)

    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = exit.run(lambda: supervise(train, ParallelConfig(dp=2)))
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read(2) == b".."
    os.kill(pid, signal.SIGUSR1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert capfd.readouterr().err == ""


def test_ranks_do_not_outlive_a_killed_launcher(sleeper):
    pid, ranks, _ = sleeper
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert all(_ends(rank) for rank in ranks)


def _ends(pid: int) -> bool:
    """Whether the process is gone, or a zombie that nobody reaps, within five seconds."""
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_rank_killed_in_mid_training_ends_the_run_with_its_name(tmp_path, capfd):
    blend = write_corpus(tmp_path)
    values = SMALL | {
        "data.blend": blend,
        "run.dir": tmp_path / "run",
        "train.steps": 3000,
        "outer.interval": 3,
        "parallel.replicas": 2,
        "parallel.tp": 2,
    }
    resolved = load("demo", [f"{key}={value}" for key, value in values.items()])

    def killer() -> None:
        if os.environ["LOCAL_RANK"] == "3":
            _when_training(tmp_path / "run", signal.SIGKILL)
        loop.train(resolved)

    with pytest.raises(RankFailure, match="replica 1 rank 1 was killed by SIGKILL"):
        supervise(killer, resolved.config.parallel)
    assert "Traceback" not in capfd.readouterr().err
    assert children_left() == []


@pytest.mark.parametrize(
    "layout",
    [{"parallel.pp": 2}, {"parallel.dp": 2, "parallel.ep": 2, "model.experts": 4}],
    ids=["pipeline", "experts"],
)
def test_rank_stopped_in_mid_training_is_named_after_the_time_out(tmp_path, layout):
    """Also where megatron-core waits for it, in a group that it has built."""
    values = SMALL | {"data.blend": write_corpus(tmp_path), "run.dir": tmp_path / "run"} | layout
    values |= {"train.steps": 3000, "run.timeout_seconds": 3}
    resolved = load("demo", [f"{key}={value}" for key, value in values.items()])

    def stopper() -> None:
        if os.environ["LOCAL_RANK"] == "1":
            _when_training(tmp_path / "run", signal.SIGSTOP)
        loop.train(resolved)

    with pytest.raises(RankFailure, match="no sign of life from replica 0 rank 1"):
        supervise(stopper, resolved.config.parallel)


def test_interrupt_says_where_the_same_command_goes_on(tmp_path, capfd):
    run = tmp_path / "run"
    values = SMALL | {"data.blend": write_corpus(tmp_path), "run.dir": run, "train.steps": 3000}
    arguments = [f"{key}={value}" for key, value in (values | {"checkpoint.every": 3}).items()]

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not (run / "checkpoints/latest").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert launch.main(["local", "demo", *arguments]) == 130
    thread.join()
    latest = (run / "checkpoints/latest").read_text().strip()
    error = capfd.readouterr().err
    assert error == f"error: stopped by SIGINT; the same command goes on from {latest}\n"
    assert children_left() == []


def _when_training(folder: Path, number: signal.Signals) -> None:
    """Send this process a signal as soon as the run has taken a few steps."""
    metrics = folder / "metrics.jsonl"

    def look(*_) -> None:
        if metrics.exists() and metrics.read_text().count("\n") > 4:
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (launch, ["local", "demo", "train.stepz=3"], "did you mean train.steps?"),
        (launch, ["local", "demo", "--tp", "3"], "must be a multiple of parallel.tp=3"),
        (launch, ["local", "demo", "--tp", "2", "parallel.tp=2"], "are the same option"),
        (launch, ["local", "demo", "--dp", "2", "--ep", "2"], "use parallel.ep=1"),
        (launch, ["local", "demo", "--tpp", "2"], "unrecognized arguments: --tpp 2"),
        (launch, ["local"], "RECIPE is missing"),
        (launch, [], "COMMAND is missing"),
        (launch, ["elsewhere"], "there are local, plan"),
        (launch, ["lcal", "demo"], "did you mean local?"),
        (launch, ["slurm"], "RECIPE is missing"),
        (launch, ["slurm", "demo", "--store", "a:1"], "it needs --separate"),
        (launch, ["slurm", "15b", "--gpus-per-node", "7"], "do not fill nodes"),
        (pretrain, ["dmo"], "did you mean demo?"),
        (pretrain, ["chekpoint", "verify", "runs/a"], "did you mean checkpoint?"),
        (pretrain, ["demo", "--replicas", "2"], "unrecognized arguments: --replicas 2"),
    ],
)
def test_wrong_use_ends_with_code_2_and_one_line(program, arguments, message, capfd):
    assert _code(program, arguments) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert len(errors.splitlines()) == 1
    assert message in errors


def test_exit_code_reaches_the_shell():
    command = [sys.executable, "-m", "launch", "local", "demo", "lr=1"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 2
    assert (
        result.stderr == "error: option 'lr' is unknown; did you mean optimizer.lr or outer.lr?\n"
    )


def test_show_prints_every_option_and_trains_nothing(capfd):
    assert _code(pretrain, ["demo", "train.steps=7", "--show"]) == 0
    lines = capfd.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["train.steps"][1:4] == ["7", "command", "line"]
    assert rows["model.layers"][1:4] == ["4", "recipe", "demo"]


@pytest.mark.parametrize(("program", "arguments"), [(pretrain, []), (launch, ["local"])])
def test_help_teaches(program, arguments, capfd):
    assert _code(program, [*arguments, "--help"]) == 0
    assert "RECIPE" in capfd.readouterr().out


def _code(program, arguments: list[str]) -> int:
    try:
        return program.main(arguments)
    except SystemExit as end:
        return end.code
