"""Checkpoints of weights alone, which may be larger than the memory."""

import errno
import re
import threading
from pathlib import Path

import torch

from megatron_ext.checkpoint.saved import Saved
from megatron_ext.checkpoint.weights import write
from tests.data_prep.helpers import small_disk
from tests.ranks import run

COUNT, NUMEL = 6, 10 * 2**20  # of 40 MiB: smaller ones leave holes that the allocator keeps


def drawn():
    for number in range(COUNT):
        generator = torch.Generator().manual_seed(number)
        yield f"layers.{number}.mlp.up", torch.randn(NUMEL // 64, 64, generator=generator)


def own_memory_bytes() -> int:
    """Without what is only mapped from files."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


def write_and_watch(rank, folder):
    """How much memory writing took at most, above what there was before."""
    before = peak = own_memory_bytes()
    ended = threading.Event()

    def watch():
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, own_memory_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    write(folder, drawn(), {"step": 7})
    ended.set()
    watcher.join()
    return peak - before


def test_a_model_larger_than_the_memory_is_held_in_it(tmp_path):
    (taken,) = run(write_and_watch, 1, tmp_path / "out")
    assert taken < COUNT * NUMEL * 4 / 2
    found = dict(Saved(tmp_path / "out" / "step-00000007").global_weights())
    for name, tensor in drawn():
        assert torch.equal(found.pop(name), tensor)
    assert not found
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def write_all(rank, folder):
    try:
        write(folder, drawn(), {"step": 7})
    except OSError as error:
        return error.errno
    return None


def test_a_disk_that_fills_up_meanwhile_kills_the_process(tmp_path):
    with small_disk(tmp_path / "disk", "20m"):
        assert run(write_all, 1, tmp_path / "disk" / "out") == [errno.ENOSPC]
        assert not list((tmp_path / "disk").iterdir())
