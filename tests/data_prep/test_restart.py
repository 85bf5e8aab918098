"""Exactly once: whatever breaks off, a rerun gives the bytes of one clean run."""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from data_prep import executor
from data_prep.cli import main
from tests.data_prep.helpers import (
    SENTENCEPIECE,
    command,
    documents,
    json_lines,
    process,
    small_disk,
    tree,
    write,
)
from tests.data_prep.kills import killed_at

MODEL = SentencePieceProcessor(model_file=str(SENTENCEPIECE))


def arguments(given, out, *options, workers=1):
    return [
        "tokenize", given, "--tokenizer", SENTENCEPIECE, "--output", out, "--workers", workers,
        *options,
    ]  # fmt: skip


@pytest.fixture
def corpus(tmp_path):
    """Six small files in two partitions, one of them with a bad record."""
    for number in range(6):
        texts = [f"file {number} line {line} " * 5 for line in range(20)]
        content = json_lines(texts) + (b"broken\n" if number == 4 else b"")
        suffix = (".jsonl", ".jsonl.gz", ".jsonl.zstd")[number % 3]
        write(tmp_path / "in" / f"quality={number % 2}" / f"{number}{suffix}", content, [77])
    return tmp_path / "in"


OPTIONS = ("--validation", "20%", "--unit-bytes", "2K", "--bad-records", "skip", "--max-bad", "5%")


@pytest.fixture
def clean(corpus, tmp_path, capsys):
    """The output of a run that nothing disturbed."""
    assert command(capsys, *arguments(corpus, tmp_path / "clean", *OPTIONS)).code == 0
    return tree(tmp_path / "clean")


def test_killed_at_any_point_a_rerun_gives_the_bytes_of_a_clean_run(
    corpus, clean, tmp_path, capsys
):
    out = tmp_path / "out"

    def taken_up(point):
        shutil.rmtree(out, ignore_errors=True)
        if not killed_at(point, out, arguments(corpus, out, *OPTIONS)):
            return False
        strays = {name for name in tree(out) if not name.startswith(".work/")}
        assert strays <= set(clean), "work in progress lies below .work only"
        ended = command(capsys, *arguments(corpus, out, *OPTIONS))
        assert ended.code == 0, (point, ended.err)
        assert tree(out) == clean, point
        return True

    # Every point of beginning and of publishing, and one in seven of what repeats between them.
    for point in itertools.chain(range(1, 12), itertools.count(12, 7)):
        if not taken_up(point):
            break
    assert point > 200
    for publishing in range(point - 45, point):
        taken_up(publishing)


def test_killed_again_and_again_it_still_ends_with_the_bytes_of_a_clean_run(
    corpus, clean, tmp_path
):
    out = tmp_path / "out"
    kills = 0
    while killed_at(40, out, arguments(corpus, out, *OPTIONS)):
        kills += 1
    assert kills >= 5
    assert tree(out) == clean


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(corpus, clean, tmp_path, capsys, workers):
    out = tmp_path / "out"
    assert command(capsys, *arguments(corpus, out, *OPTIONS, workers=workers)).code == 0
    assert tree(out) == clean


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.002)


def children_of(process) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [
        int(child)
        for child in path.read_text().split()
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@pytest.fixture
def long_corpus(tmp_path):
    """Enough for a run of two workers to be caught in the middle."""
    for number in range(12):
        texts = [f"file {number} line {line} of many words " * 100 for line in range(150)]
        write(tmp_path / "in" / f"{number:02d}.jsonl.zstd", json_lines(texts))
    return tmp_path / "in"


def test_a_run_of_two_workers_that_is_killed_is_taken_up(long_corpus, tmp_path, capsys):
    clean, out = tmp_path / "clean", tmp_path / "out"
    assert command(capsys, *arguments(long_corpus, clean)).code == 0
    running = process(*arguments(long_corpus, out, workers=2))
    wait_for(lambda: len(list(out.glob(".work/units/*/*/receipt.json"))) >= 3, running)
    workers = children_of(running)
    assert len(workers) == 2
    running.kill()
    running.communicate()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}/stat").exists() for worker in workers):
        assert time.monotonic() < deadline, "workers outlive the run"
        time.sleep(0.01)
    done = len(list(out.glob(".work/units/*/*/receipt.json")))
    assert 3 <= done < 12 and not (out / "manifest.json").exists()
    assert command(capsys, *arguments(long_corpus, out, workers=2)).code == 0
    assert tree(out) == tree(clean)


def test_a_worker_that_is_killed_is_named_and_the_run_ends(long_corpus, tmp_path, capsys):
    out = tmp_path / "out"
    running = process(*arguments(long_corpus, out, workers=2))
    wait_for(lambda: list(out.glob(".work/units/*/*/receipt.json")), running)
    victim = children_of(running)[0]
    os.kill(victim, signal.SIGKILL)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert f"(process {victim}) died with signal SIGKILL" in err and "while on" in err
    assert command(capsys, *arguments(long_corpus, out)).code == 0


def test_workers_that_hang_are_waited_for_forever(long_corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(executor, "STALL_SECONDS", 3)
    out = tmp_path / "out"

    def hang():
        while not list(out.glob(".work/units/*/*/receipt.json")):
            time.sleep(0.01)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGSTOP)

    threading.Thread(target=hang, daemon=True).start()
    ended = command(capsys, *arguments(long_corpus, out, workers=2))
    assert ended.code == 1
    assert (
        "no worker was heard of for 3 s; waiting for 0" in ended.err and "by process" in ended.err
    )
    assert not multiprocessing.active_children()
    assert command(capsys, *arguments(long_corpus, out)).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_one_line_and_leaves_no_process(
    long_corpus, tmp_path, capsys, number
):
    out = tmp_path / "out"
    running = process(*arguments(long_corpus, out, workers=2))
    wait_for(lambda: list(out.glob(".work/units/*/*/receipt.json")), running)
    workers = children_of(running)
    os.killpg(running.pid, number) if number == signal.SIGINT else running.terminate()
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert err.splitlines()[-1].startswith("interrupted; what is finished is kept")
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def refused(capsys, out, arguments, *messages):
    """The command is refused with these words, and nothing in `out` has changed."""
    before = tree(out)
    ended = command(capsys, *arguments)
    assert ended.code == 2, ended
    for message in messages:
        assert message in ended.err
    after = tree(out)
    for found in (before, after):
        found.pop(".work/lock", None)  # names its last holder
    assert after == before


@pytest.mark.parametrize("finished", [True, False])
def test_another_run_into_the_same_folder_is_refused_with_what_differs(
    corpus, tmp_path, capsys, finished
):
    out = tmp_path / "out"
    if finished:
        assert command(capsys, *arguments(corpus, out, *OPTIONS)).code == 0
    else:
        assert killed_at(100, out, arguments(corpus, out, *OPTIONS))
    changed = [*OPTIONS[:1], "10%", *OPTIONS[2:]]
    refused(capsys, out, arguments(corpus, out, *changed), 'options.validation: was "1/5", now')
    eod = arguments(corpus, out, *OPTIONS, "--eod", "1")
    refused(capsys, out, eod, "tokenizer.eod: was 2, now 1")
    some = arguments(corpus, out, *OPTIONS, "--where", "quality=0")
    refused(capsys, out, some, "options.where", "inputs.quality=1/1.jsonl.gz", "now absent")
    path = corpus / "quality=0" / "0.jsonl"
    path.write_bytes(path.read_bytes().replace(b"line 3", b"line 4"))
    refused(capsys, out, arguments(corpus, out, *OPTIONS), "inputs.quality=0/0.jsonl: content")
    path.write_bytes(path.read_bytes() + json_lines(["more"]))
    refused(capsys, out, arguments(corpus, out, *OPTIONS), "inputs.quality=0/0.jsonl: was")


def test_an_input_that_was_only_touched_is_no_other_input(corpus, clean, tmp_path, capsys):
    out = tmp_path / "out"
    assert killed_at(100, out, arguments(corpus, out, *OPTIONS))
    for path in corpus.rglob("*.*"):
        os.utime(path, (1, 1))
    assert command(capsys, *arguments(corpus, out, *OPTIONS)).code == 0
    assert tree(out) == clean


def test_a_finished_run_that_is_repeated_changes_nothing(corpus, clean, tmp_path, capsys):
    out = tmp_path / "clean"
    ended = command(capsys, *arguments(corpus, out, *OPTIONS, workers=2))
    assert ended.code == 0 and "train from" in ended.out
    assert tree(out) == clean


def test_files_of_unknown_origin_are_not_mixed_with(corpus, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.bin").write_bytes(b"x")
    ended = command(capsys, *arguments(corpus, tmp_path / "out"))
    assert (ended.code, "holds old.bin already, which is not of this run" in ended.err) == (2, True)


def test_one_run_at_a_time_holds_a_folder_and_a_dead_ones_lock_is_stale(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    assert killed_at(100, out, arguments(corpus, out, *OPTIONS))
    assert (out / ".work" / "lock").exists()  # left by the run that died
    with (out / ".work" / "lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = command(capsys, *arguments(corpus, out, *OPTIONS))
        assert ended.code == 2 and "is working here" in ended.err and "process" in ended.err
    assert command(capsys, *arguments(corpus, out, *OPTIONS)).code == 0


def test_a_damaged_part_is_noticed_before_it_is_published(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    assert killed_at(100, out, arguments(corpus, out, *OPTIONS))
    part = next(out.glob(".work/units/*/*/train.bin"))
    part.write_bytes(b"\xff" + part.read_bytes()[1:])
    ended = command(capsys, *arguments(corpus, out, *OPTIONS))
    assert (ended.code, "its hash differs" in ended.err) == (3, True)
    shutil.rmtree(part.parent)
    assert command(capsys, *arguments(corpus, out, *OPTIONS)).code == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_leaves_finished_units_usable(long_corpus, tmp_path, capsys, workers):
    clean = tmp_path / "clean"
    assert command(capsys, *arguments(long_corpus, clean)).code == 0
    with small_disk(tmp_path / "disk", "10m"):
        out, ballast = tmp_path / "disk" / "out", tmp_path / "disk" / "ballast"
        running = process(*arguments(long_corpus, out, workers=workers))
        wait_for(lambda: list(out.glob(".work/units/*/*/receipt.json")), running)
        ballast.write_bytes(b"")
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        _, err = running.communicate(timeout=120)
        assert (running.returncode, err.count("\n")) == (1, 1), err
        assert "the disk is full; what is finished is kept" in err
        done = set(out.glob(".work/units/*/*/receipt.json"))
        ended = command(capsys, *arguments(long_corpus, out))  # nobody made room
        assert ended.code == 1 and ended.err.count("\n") == 1
        assert done and done <= set(out.glob(".work/units/*/*/receipt.json"))
        ballast.unlink()
        assert command(capsys, *arguments(long_corpus, out)).code == 0
        assert tree(out) == tree(clean)


def test_a_run_that_cannot_fit_is_refused_before_it_begins(long_corpus, tmp_path, capsys):
    with small_disk(tmp_path / "disk", "1m"):
        ended = command(capsys, *arguments(long_corpus, tmp_path / "disk" / "out"))
        assert ended.code == 1
        assert "are needed and" in ended.err and "are free" in ended.err
        assert not list((tmp_path / "disk").glob("out/.work/units/*/*"))


def test_peak_disk_use_is_at_most_a_tenth_above_the_output(long_corpus, tmp_path, capsys):
    out = tmp_path / "out"
    running = process(*arguments(long_corpus, out, "--unit-bytes", "200K"))
    peak = 0
    while running.poll() is None:
        sizes = (size_of(path) for path in [*out.rglob("*.bin"), *out.rglob("*.idx")])
        peak = max(peak, sum(sizes))
        time.sleep(0.001)
    final = sum(size_of(path) for path in out.rglob("*.bin"))
    assert running.returncode == 0 and 0 < peak <= 1.1 * final


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
BAD = st.sampled_from([b"{", b"[1]", b'{"text": null}', b'{"t": 1}', b"\xff"])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    files=st.lists(
        st.tuples(
            st.lists(TEXT | BAD, max_size=8),
            st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zstd"]),
            st.lists(st.integers(0, 300), max_size=3),
        ),
        min_size=1,
        max_size=4,
    ),
    unit_bytes=st.integers(1, 400),
    workers=st.sampled_from([1, 1, 1, 2, 3]),
    kill=st.integers(1, 150),
)
def test_documents_out_are_the_accepted_documents_in(tmp_path, files, unit_bytes, workers, kill):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    accepted = []
    for number, (rows, suffix, cuts) in enumerate(files):
        lines = [row + b"\n" if isinstance(row, bytes) else json_lines([row]) for row in rows]
        content = b"".join(lines)
        cuts = [min(cut, len(content)) for cut in cuts]
        write(folder / "in" / f"p={number % 2}" / f"{number}{suffix}", content, cuts)
        accepted += [row for row in rows if isinstance(row, str)]
    out = folder / "out"
    options = ("--unit-bytes", unit_bytes, "--bad-records", "skip", "--max-bad", "99.9%")
    first = [*map(str, arguments(folder / "in", out, *options))]
    if not accepted:
        assert main(first) == 3
        return
    killed_at(kill, out, first)
    assert main([*map(str, arguments(folder / "in", out, *options, workers=workers))]) == 0
    expected = Counter((*MODEL.encode(text), 2) for text in accepted)
    assert Counter(map(tuple, documents(out))) == expected
