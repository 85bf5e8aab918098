"""A run that was saved goes on as if nothing had happened, on the same cutting or another."""

import os
from pathlib import Path

import psutil
import pytest
import torch

from megatron_ext.checkpoint import SHARED_KINDS, Checkpoints
from megatron_ext.errors import ConfigError, TrainingError
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.checkpoint.toy import SHAPES, ToyState
from tests.ranks import run


def _save(rank: int, folder: Path, parallel: ParallelConfig, cutting: int, steps: list[int]):
    with join(parallel, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        checkpoints.find("auto")
        for step in steps:
            checkpoints.save(ToyState(replicas, cutting, step), step)
        return len(psutil.Process(os.getpid()).children())


def _load(rank: int, folder: Path, parallel: ParallelConfig, cutting: int, step: int):
    with join(parallel, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        state = ToyState(replicas, cutting)
        checkpoints.load(checkpoints.find("auto"), state)
        return {
            "differences": state.differences(step),
            "step": state.step,
            "rng": state.restored_rng,
        }


def test_every_bit_comes_back_on_the_same_layout(tmp_path):
    parallel = ParallelConfig(replicas=2, tp=2)
    children = run(_save, 4, tmp_path, parallel, 1, [5])
    loaded = run(_load, 4, tmp_path, parallel, 1, 5)
    assert [rank["differences"] for rank in loaded] == [[]] * 4
    assert [rank["step"] for rank in loaded] == [5] * 4
    # Each rank gets its own random state back, not its neighbour's.
    assert [rank["rng"].tolist() for rank in loaded] == [[10 * n + 5] * 16 for n in range(4)]
    assert children == [0] * 4, "a save leaves processes behind"


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_bit_comes_back_on_another_cutting(tmp_path, ranks):
    run(_save, 4, tmp_path, ParallelConfig(tp=2, dp=2), 1, [5])
    loaded = run(_load, ranks, tmp_path, ParallelConfig(dp=ranks), 2, 5)
    assert [rank["differences"] for rank in loaded] == [[]] * ranks
    assert [rank["rng"] for rank in loaded] == [None] * ranks


def test_shared_state_is_written_once(tmp_path):
    run(_save, 4, tmp_path, ParallelConfig(replicas=2, tp=2), 1, [5])
    step = tmp_path / "step-00000005"
    assert sorted(path.name for path in step.iterdir()) == [
        "manifest.json",
        "replica-0",
        "replica-1",
        "shared",
    ]
    size_bytes = sum(path.stat().st_size for path in (step / "shared").rglob("*.distcp"))
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert 2 * 4 * elements <= size_bytes < 100_000


def test_older_checkpoints_are_removed_and_latest_follows(tmp_path):
    run(_save, 1, tmp_path, ParallelConfig(), 1, [5, 10, 15])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000010",
        "step-00000015",
    ]
    assert (tmp_path / "latest").read_text() == "step-00000015\n"


def _save_keeping(rank: int, folder: Path, steps: list[int], keep_last: int, keep_every: int):
    with join(ParallelConfig(), timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas, keep_last, keep_every)
        for step in steps:
            checkpoints.save(ToyState(replicas, 1, step), step)


def test_milestones_stay(tmp_path):
    run(_save_keeping, 1, tmp_path, [5, 10, 15, 20, 25], 1, 10)
    assert sorted(path.name[-2:] for path in tmp_path.glob("step-*")) == ["10", "20", "25"]


def test_nothing_is_overwritten(tmp_path):
    run(_save, 1, tmp_path, ParallelConfig(), 1, [5])
    before = (tmp_path / "step-00000005/manifest.json").read_bytes()
    with pytest.raises(TrainingError, match="step-00000005 exists already"):
        run(_save, 1, tmp_path, ParallelConfig(), 1, [5])
    assert (tmp_path / "step-00000005/manifest.json").read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))


def _load_into_another_model(rank: int, folder: Path, parallel: ParallelConfig):
    SHAPES["layers.0.attention.q"] = (8, 9)
    return _load(rank, folder, parallel, 1, 5)


def test_a_model_of_another_shape_is_refused_by_the_tensors_name(tmp_path):
    run(_save, 1, tmp_path, ParallelConfig(), 1, [5])
    with pytest.raises(ConfigError, match=r"master.layers.0.attention.q is \[8, 8\].*\[8, 9\]"):
        run(_load_into_another_model, 2, tmp_path, ParallelConfig(dp=2))


class _WithoutMomentum(ToyState):
    def tensors(self):
        return [tensor for tensor in super().tensors() if tensor[0] != "outer_momentum"]


def _load_without_outer_momentum(rank: int, folder: Path):
    with join(ParallelConfig(), timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        checkpoints.load(checkpoints.find("auto"), _WithoutMomentum(replicas, 1))


def test_state_that_the_run_would_drop_is_refused(tmp_path):
    run(_save, 1, tmp_path, ParallelConfig(), 1, [5])
    with pytest.raises(ConfigError, match=r"outer_momentum.embedding is .* absent in the run"):
        run(_load_without_outer_momentum, 1, tmp_path)


class _DataParallel(ToyState):
    def tensors(self):
        return [tensor for tensor in super().tensors() if tensor[0] not in SHARED_KINDS]


def _save_and_load_without_shared_state(rank: int, folder: Path):
    with join(ParallelConfig(dp=2), timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        checkpoints.save(_DataParallel(replicas, 1, 5), 5)
        state = _DataParallel(replicas, 2)
        checkpoints.load(checkpoints.find("auto"), state)
        return {name for name in state.differences(5) if not name.startswith(SHARED_KINDS)}


def test_a_run_without_outer_loop_has_no_shared_state(tmp_path):
    assert run(_save_and_load_without_shared_state, 2, tmp_path) == [set(), set()]
    assert not (tmp_path / "step-00000005/shared").exists()


class _WithHole(ToyState):
    def tensors(self):
        return super().tensors()[1:]


def _save_with_hole(rank: int, folder: Path):
    with join(ParallelConfig(), timeout_seconds=30) as replicas:
        Checkpoints(folder, replicas).save(_WithHole(replicas, 1, 5), 5)


def test_a_parameter_that_nobody_owns_in_part_is_not_saved_as_if_whole(tmp_path):
    with pytest.raises(TrainingError, match=r"master.embedding: the blocks .* hold"):
        run(_save_with_hole, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []
