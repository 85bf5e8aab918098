"""What is asked of a run happens after one step of all processes: to save, or to save and end."""

import os
import signal
from pathlib import Path

import pytest

from pretrain import exit, loop
from pretrain.appointments import SAVE_FILE, SAVE_SIGNAL, SIGNALS
from pretrain.config import load
from pretrain.session import open_session
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, lines, losses
from tests.ranks import run

ASKED_AT = 3
STEPS = 40


def overrides_of(blend: Path, folder: Path, layout: dict) -> list[str]:
    values = SMALL | {"data.blend": blend, "run.dir": folder, "train.steps": STEPS} | layout
    return [f"{key}={value}" for key, value in values.items()]


def train(rank: int, overrides: list[str], asked: int | None, number: int | None) -> int:
    """Train until the run ends; returns the last step.

    `asked` gets the signal in step ASKED_AT, or where there is none the file asks.
    """
    exit.quieten_imports()
    before = [signal.getsignal(each) for each in (*SIGNALS, SAVE_SIGNAL)]
    with open_session(load("demo", overrides)) as session:
        record = session.record

        def record_and_ask(*arguments) -> None:
            record(*arguments)
            if rank != asked or session.state.step != ASKED_AT:
                return
            if number:
                os.kill(os.getpid(), number)
            else:
                (Path(session.config.run.dir) / SAVE_FILE).touch()

        session.record = record_and_ask
        loop.run(session)
        assert [signal.getsignal(each) for each in (*SIGNALS, SAVE_SIGNAL)] == before
        return session.state.step


@pytest.mark.parametrize(
    ("layout", "asked", "number", "within"),
    [
        ({"parallel.dp": 2}, 1, signal.SIGUSR1, 2),
        ({"parallel.pp": 2}, 0, signal.SIGTERM, 1),
        # One replica may run ahead of the other until their next outer step.
        ({"parallel.replicas": 2, "outer.interval": 4}, 1, signal.SIGTERM, 12),
        ({"parallel.replicas": 2, "outer.interval": 4}, 0, signal.SIGUSR1, 12),
    ],
)
def test_signal_to_any_process_ends_all_after_the_same_step(
    layout, asked, number, within, tmp_path
):
    blend = write_corpus(tmp_path)
    overrides = overrides_of(blend, tmp_path / "run", layout)
    processes = load("demo", overrides).config.parallel.world_size
    last = run(train, processes, overrides, asked, number)
    assert len(set(last)) == 1
    assert ASKED_AT < last[0] <= ASKED_AT + within
    latest = (tmp_path / "run/checkpoints/latest").read_text()
    assert latest == f"step-{last[0]:08}\n"


def test_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path):
    blend = write_corpus(tmp_path)
    layout = {"parallel.replicas": 2, "outer.interval": 3, "train.steps": 14}
    straight = overrides_of(blend, tmp_path / "straight", layout)
    stopped = overrides_of(blend, tmp_path / "stopped", layout)
    run(train, 2, straight, None, signal.SIGTERM)
    (last, _) = run(train, 2, stopped, 1, signal.SIGTERM)
    assert last < 14
    assert run(train, 2, stopped, None, signal.SIGTERM) == [14, 14]
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")


@pytest.mark.parametrize("number", [SAVE_SIGNAL, None], ids=["signal", "file"])
def test_a_save_on_demand_is_one_step_of_all_and_ends_nothing(tmp_path, number):
    layout = {"parallel.replicas": 2, "outer.interval": 3, "train.steps": 16}
    overrides = overrides_of(write_corpus(tmp_path), tmp_path / "run", layout)
    assert run(train, 2, overrides, 1, number) == [16, 16]
    saved = [e["step"] for e in lines(tmp_path / "run", "events") if e["event"] == "checkpoint"]
    assert len(saved) == 2 and ASKED_AT < saved[0] < 16 == saved[1]
    assert not (tmp_path / "run" / SAVE_FILE).exists()


def test_saves_by_the_clock_are_saves_of_all_processes(tmp_path):
    layout = {
        "parallel.replicas": 2,
        "outer.interval": 2,
        "checkpoint.every_minutes": 1e-4,
        "train.steps": 12,
    }
    overrides = overrides_of(write_corpus(tmp_path), tmp_path / "run", layout)
    assert run(train, 2, overrides, None, None) == [12, 12]
    saved = [e["step"] for e in lines(tmp_path / "run", "events") if e["event"] == "checkpoint"]
    assert len(saved) > 3 and saved == sorted(set(saved))
