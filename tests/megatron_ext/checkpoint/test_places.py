"""Replicas that write in different places commit together, or not at all."""

import os
import resource
import signal
import threading
from pathlib import Path

import pytest

from megatron_ext.checkpoint import Checkpoints
from megatron_ext.errors import ConfigError, DataError, PeerError, TrainingError
from megatron_ext.replicas import ParallelConfig, Replicas, join
from tests.megatron_ext.checkpoint.toy import ToyState
from tests.ranks import run

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

LAYOUT = ParallelConfig(replicas=2, dp=2)


def _checkpoints(replicas: Replicas, folder: Path, swapped: bool = False, **more) -> Checkpoints:
    """Each replica's on a disk of its own."""
    place = folder / f"place-{replicas.index ^ swapped}"
    return Checkpoints(place, replicas, one_place=False, **more)


def _save(rank: int, folder: Path, steps: list[int]):
    with join(LAYOUT, timeout_seconds=30) as replicas:
        checkpoints = _checkpoints(replicas, folder, keep_last=3)
        checkpoints.find("auto")
        return [checkpoints.save(ToyState(replicas, 1, step), step).written.step for step in steps]


def _resume(rank: int, folder: Path, swapped: bool = False, count: int = 2, resume: str = "auto"):
    with join(ParallelConfig(replicas=count, dp=2), timeout_seconds=30) as replicas:
        checkpoints = _checkpoints(replicas, folder, swapped)
        state = ToyState(replicas, 2)
        if checkpoints.resume(resume, state) is None:
            return None
        return state.step, state.differences(state.step)


def _names(folder: Path) -> list[list[str]]:
    return [sorted(path.name for path in place.iterdir()) for place in sorted(folder.iterdir())]


def test_each_place_holds_all_that_its_replica_needs(tmp_path):
    assert run(_save, 4, tmp_path, [5, 10]) == [[5, 10]] * 4
    for place in ("place-0", "place-1"):
        step = tmp_path / place / "step-00000010"
        assert sorted(path.name for path in step.iterdir()) == [
            "manifest.json",
            f"replica-{place[-1]}",
            "shared",
        ]
    assert run(_resume, 4, tmp_path) == [(10, [])] * 4


def _save_and_die(rank: int, folder: Path, event: str, victim: int):
    armed = threading.Event()

    def observe(passed: str) -> None:
        if passed == event and rank == victim and armed.is_set():
            os.kill(os.getpid(), signal.SIGKILL)

    with join(ParallelConfig(replicas=2), timeout_seconds=1) as replicas:
        checkpoints = _checkpoints(replicas, folder, observe=observe)
        checkpoints.find("auto")
        checkpoints.save(ToyState(replicas, 1, 5), 5)
        armed.set()
        checkpoints.save(ToyState(replicas, 1, 10), 10)


@pytest.mark.parametrize("victim", [0, 1], ids=["chair", "other"])
@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param("file", 5, marks=pytest.mark.slow),
        ("manifest", 5),
        ("prepared", 5),
        ("committed", 10),
        pytest.param("latest", 10, marks=pytest.mark.slow),
    ],
)
def test_killed_between_prepare_and_commit(tmp_path, event, expected, victim):
    """Where one replica has renamed its folder and the other has not, the step does not count."""
    with pytest.raises(PeerError):
        run(_save_and_die, 2, tmp_path, event, victim, may_die=[victim])
    assert run(_resume, 4, tmp_path) == [(expected, [])] * 4
    newest = f"step-{expected:08d}"
    for names in _names(tmp_path):
        assert names[-1] == newest, "what only one replica committed is gone"
    run(_save, 4, tmp_path, [15])
    assert run(_resume, 4, tmp_path) == [(15, [])] * 4


def _fill_one_disk(rank: int, folder: Path):
    with join(LAYOUT, timeout_seconds=30) as replicas:
        checkpoints = _checkpoints(replicas, folder)
        checkpoints.save(ToyState(replicas, 1, 5), 5)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, unlimited[1]))
        with pytest.raises(TrainingError, match=r"step 10 was not saved.*File too large"):
            checkpoints.save(ToyState(replicas, 1, 10), 10)
        replicas.barrier("failed")
        return _names(folder)


def test_a_disk_that_is_full_in_one_place_leaves_nothing_half_in_any(tmp_path):
    for names in run(_fill_one_disk, 4, tmp_path):
        assert names == [["latest", "step-00000005"]] * 2


def test_a_place_that_was_lost_stops_the_run_and_deletes_nothing(tmp_path):
    run(_save, 4, tmp_path, [5, 10])
    (tmp_path / "place-1").rename(tmp_path.parent / f"{tmp_path.name}-lost")
    with pytest.raises(DataError, match=r"replica 0: 5, 10; replica 1: none"):
        run(_resume, 4, tmp_path)
    assert "step-00000010" in _names(tmp_path)[0]


def test_places_that_were_swapped_and_another_number_of_replicas_are_refused(tmp_path):
    run(_save, 4, tmp_path, [5])
    with pytest.raises(ConfigError, match=r"it is of replica 1, and replica 0 was started here"):
        run(_resume, 4, tmp_path, True)
    with pytest.raises(ConfigError, match=r"parallel.replicas is 1 and was 2"):
        run(_resume, 2, tmp_path, False, 1)
    with pytest.raises(ConfigError, match=r"resume=none, but there are checkpoints, up to step 5"):
        run(_resume, 4, tmp_path, False, 2, "none")
