"""Whatever interrupts a save, the run goes on from a complete checkpoint."""

import faulthandler
import logging.handlers
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megatron_ext.checkpoint import Checkpoints, saving
from megatron_ext.errors import ConfigError, DataError, PeerError, TrainingError
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.checkpoint.toy import ToyState
from tests.ranks import run

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

TWO_REPLICAS = ParallelConfig(replicas=2, dp=2)


def _save(rank: int, folder: Path, parallel: ParallelConfig, steps: list[int], keep_last: int = 2):
    with join(parallel, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas, keep_last)
        checkpoints.find("auto")
        for step in steps:
            checkpoints.save(ToyState(replicas, 1, step), step)


def _resume(rank: int, folder: Path, parallel: ParallelConfig, resume: str = "auto"):
    with join(parallel, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        path = checkpoints.find(resume)
        if path is None:
            return None
        state = ToyState(replicas, 1)
        checkpoints.load(path, state)
        return state.step, state.differences(state.step)


def _resume_listening(rank: int, folder: Path):
    """What `_resume` returns, and what it warned of."""
    said = logging.handlers.BufferingHandler(1000)
    logging.getLogger("megatron_ext").addHandler(said)
    return _resume(rank, folder, ParallelConfig()), "\n".join(
        record.getMessage() for record in said.buffer
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _save_and_die(
    rank: int, folder: Path, parallel: ParallelConfig, event: str, victim: int, background: bool
):
    """Save step 5, then die by SIGKILL when the save of step 10 passes `event`."""
    armed = threading.Event()

    def observe(passed: str) -> None:
        if passed == event and rank == victim and armed.is_set():
            os.kill(os.getpid(), signal.SIGKILL)

    # Only where somebody is left to wait does the time-out decide how long the test takes.
    with join(parallel, timeout_seconds=30 if parallel.world_size == 1 else 1) as replicas:
        checkpoints = Checkpoints(folder, replicas, keep_last=1, observe=observe)
        checkpoints.find("auto")
        checkpoints.save(ToyState(replicas, 1, 5), 5)
        armed.set()
        if background:
            checkpoints.save_in_background(ToyState(replicas, 1, 10), 10)
            raise checkpoints.wait().error
        checkpoints.save(ToyState(replicas, 1, 10), 10)


BEFORE = ["staged", "space", "file", "index", "counters", "manifest"]
AFTER = ["committed", "latest", "pruned"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("event", BEFORE + AFTER)
def test_killed_at_any_point_of_a_save(tmp_path, event, background):
    alone = ParallelConfig()
    run(_save_and_die, 1, tmp_path, alone, event, 0, background, may_die=[0])
    expected = 5 if event in BEFORE else 10
    assert run(_resume, 1, tmp_path, alone) == [(expected, [])]
    remaining = {f"step-{expected:08d}", "latest"}
    # Killed between the commit and the removal of the older one, both are there.
    assert remaining <= set(_names(tmp_path)) <= remaining | {"step-00000005"}
    assert (tmp_path / "latest").read_text() == f"step-{expected:08d}\n"
    # The step whose save was interrupted can be saved by the next session.
    run(_save, 1, tmp_path, alone, [15])
    assert run(_resume, 1, tmp_path, alone) == [(15, [])]


@pytest.mark.parametrize("event", ["file", "counters"])
def test_one_of_several_killed(tmp_path, event):
    victim = 2  # the first rank of the second replica, for which its second rank waits
    with pytest.raises(PeerError, match=r"step 10: .*no word within 3 s from replica 1 rank 0"):
        run(_save_and_die, 4, tmp_path, TWO_REPLICAS, event, victim, False, may_die=[victim])
    assert run(_resume, 4, tmp_path, TWO_REPLICAS) == [(5, [])] * 4
    assert _names(tmp_path) == ["latest", "step-00000005"]


def _fill_the_disk(rank: int, folder: Path, victim: int, background: bool):
    """The limit on the size of a file stands for a full disk: both fail while writing."""
    with join(TWO_REPLICAS, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        checkpoints.save(ToyState(replicas, 1, 5), 5)
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, unlimited[1]))
        state = ToyState(replicas, 1, 10)
        if background:
            checkpoints.save_in_background(state, 10)
            error = checkpoints.wait().error
        else:
            with pytest.raises(TrainingError) as raised:
                checkpoints.save(state, 10)
            error = raised.value
        replicas.barrier("failed")
        left = _names(folder)
        replicas.barrier("looked")
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        checkpoints.save(ToyState(replicas, 1, 15), 15)
        return str(error), left


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_full_disk_leaves_the_previous_checkpoint_and_the_run_alive(tmp_path, victim, background):
    for message, left in run(_fill_the_disk, 4, tmp_path, victim, background):
        assert "step 10 was not saved" in message
        assert "File too large" in message
        assert left == ["latest", "step-00000005"]
    assert run(_resume, 4, tmp_path, TWO_REPLICAS) == [(15, [])] * 4


def _save_on_two_machines(rank: int, folder: Path):
    """Each replica on a disk of its own."""
    with join(TWO_REPLICAS, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder / f"machine-{replicas.index}", replicas)
        with pytest.raises(TrainingError) as raised:
            checkpoints.save(ToyState(replicas, 1, 5), 5)
        return str(raised.value)


def test_storage_that_is_not_shared_is_seen_before_anything_counts_as_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_VISIBLE_SECONDS", 1)
    for message in run(_save_on_two_machines, 4, tmp_path):
        assert "replica-1/" in message
        assert "put run.dir on storage that all processes share" in message
    assert not list(tmp_path.glob("*/step-????????"))


def _save_while_overwriting(rank: int, folder: Path):
    """The background save is held until training has changed every tensor."""
    changed = threading.Event()

    def observe(event: str) -> None:
        if event == "space":
            assert changed.wait(20)

    with join(TWO_REPLICAS, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas, observe=observe)
        state = ToyState(replicas, 1, 5)
        seen = []
        for step in (5, 10):
            changed.clear()
            state.become(step)
            checkpoints.save_in_background(state, step)
            seen.append(checkpoints.poll())
            state.become(99)
            changed.set()
            seen.append(checkpoints.wait())
        return seen[0], seen[1].error, seen[2], seen[3].error, checkpoints.poll()


def test_a_background_save_holds_the_moment_at_which_it_was_asked_for(tmp_path):
    results = run(_save_while_overwriting, 4, tmp_path)
    assert results == [(None, None, None, None, None)] * 4
    assert run(_resume, 4, tmp_path, TWO_REPLICAS, f"{tmp_path}/step-00000010") == [(10, [])] * 4


def test_leftovers_are_removed_and_a_wrong_latest_is_put_right(tmp_path):
    run(_save, 1, tmp_path, ParallelConfig(), [5, 10])
    (tmp_path / "step-00000015.partial/replica-0").mkdir(parents=True)
    (tmp_path / "step-00000001.removed").mkdir()
    (tmp_path / "latest.partial").write_text("step-00000")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "latest").write_text("step-0000001O\n")
    [(found, said)] = run(_resume_listening, 1, tmp_path)
    assert found == (10, [])
    assert _names(tmp_path) == ["latest", "notes.txt", "step-00000005", "step-00000010"]
    assert (tmp_path / "latest").read_text() == "step-00000010\n"
    for name in ("step-00000015.partial", "step-00000001.removed", "'step-0000001O'"):
        assert name in said


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\xff\x00")])
def test_a_missing_or_unreadable_latest_is_reported_and_put_right(tmp_path, damage):
    run(_save, 1, tmp_path, ParallelConfig(), [5, 10])
    damage(tmp_path / "latest")
    [(found, said)] = run(_resume_listening, 1, tmp_path)
    assert found == (10, [])
    assert f"{tmp_path}/latest" in said
    assert (tmp_path / "latest").read_text() == "step-00000010\n"


def _damage(checkpoint: Path) -> None:
    victim = next(checkpoint.glob("replica-0/*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])


def _fall_back(rank: int, folder: Path):
    with join(TWO_REPLICAS, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        state = ToyState(replicas, 1)
        path = checkpoints.resume("auto", state, fallback=True)
        checkpoints.save(ToyState(replicas, 1, 15), 15)
        return path.name, state.step, state.differences(state.step)


def test_the_newest_undamaged_checkpoint_is_taken_where_that_is_allowed(tmp_path):
    run(_save, 4, tmp_path, TWO_REPLICAS, [5, 10, 15], 3)
    for step in (10, 15):
        _damage(tmp_path / f"step-000000{step}")
    with pytest.raises(DataError, match=r"step-00000015 is damaged.*resume.fallback=true"):
        run(_resume, 4, tmp_path, TWO_REPLICAS)
    assert run(_fall_back, 4, tmp_path) == [("step-00000005", 5, [])] * 4
    assert _names(tmp_path) == [
        "latest",
        "step-00000005",
        "step-00000010.damaged",
        "step-00000015",
        "step-00000015.damaged",
    ]


def test_falling_back_never_begins_anew(tmp_path):
    run(_save, 4, tmp_path, TWO_REPLICAS, [5])
    _damage(tmp_path / "step-00000005")
    with pytest.raises(DataError, match="no other checkpoint to fall back to"):
        run(_fall_back, 4, tmp_path)
    assert _names(tmp_path) == ["latest", "step-00000005"]


def test_a_new_run_begins_where_there_is_nothing(tmp_path):
    assert run(_resume, 1, tmp_path / "new", ParallelConfig()) == [None]
    assert run(_resume, 1, tmp_path / "new", ParallelConfig(), "none") == [None]


def test_what_would_collide_with_newer_checkpoints_is_refused_at_once(tmp_path):
    run(_save, 1, tmp_path, ParallelConfig(), [5, 10])
    for resume in ("none", f"{tmp_path}/step-00000005"):
        with pytest.raises(ConfigError, match=r"resume=.*step-00000010"):
            run(_resume, 1, tmp_path, ParallelConfig(), resume)


def test_a_checkpoint_of_another_run_is_taken_by_its_path(tmp_path):
    run(_save, 1, tmp_path / "old", ParallelConfig(), [5, 10])
    for resume, step in ((tmp_path / "old", 10), (tmp_path / "old/step-00000005", 5)):
        found = run(_resume, 1, tmp_path / "new", ParallelConfig(), str(resume))
        assert found == [(step, [])]
    with pytest.raises(DataError, match="there is no checkpoint there"):
        run(_resume, 1, tmp_path / "new", ParallelConfig(), str(tmp_path))


def _mount_tmpfs(folder: Path, size_mb: int) -> None:
    """Mount it for this process alone, which must have one thread only."""
    faulthandler.cancel_dump_traceback_later()
    deadline = time.monotonic() + 2
    while len(list(Path("/proc/self/task").iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # faulthandler's thread takes a moment to end
    user, group = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)


def _save_on_a_small_disk(rank: int, folder: Path, size_mb: int):
    """Save on a disk of `size_mb`, which fills up before the files are written."""
    try:
        _mount_tmpfs(folder, size_mb)
    except (OSError, subprocess.CalledProcessError):
        return None

    def observe(event: str) -> None:
        if event == "space":
            with pytest.raises(OSError, match="No space left"):
                (folder / "filler").write_bytes(bytes((size_mb + 1) * 2**20))

    with join(ParallelConfig(), timeout_seconds=30) as replicas:
        with pytest.raises(TrainingError) as raised:
            Checkpoints(folder, replicas, observe=observe).save(ToyState(replicas, 1, 5), 5)
        return str(raised.value), _names(folder)


@pytest.mark.parametrize(
    ("size_mb", "message", "left"),
    [(1, "GB free; free space, or lower", []), (80, "No space left on device", ["filler"])],
)
def test_a_disk_that_is_too_small_or_fills_up(tmp_path, size_mb, message, left):
    [result] = run(_save_on_a_small_disk, 1, tmp_path, size_mb)
    if result is None:
        pytest.skip("this machine lets nobody mount a tmpfs")
    assert message in result[0]
    assert result[1] == left
