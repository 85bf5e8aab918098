"""A run goes on with more or fewer replicas than the checkpoint holds."""

from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint import SHARED_KINDS, Checkpoints
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.checkpoint.toy import ToyState, whole
from tests.ranks import run


class AtRoundEnd(ToyState):
    """All replicas have just taken the anchor for their masters."""

    def become(self, step: int) -> None:
        super().become(step)
        for (kind, block), tensor in zip(self.blocks, self.values, strict=True):
            if kind == "master":
                tensor.copy_(whole("anchor", block.name, 0, step)[block.slices])


def _save(rank: int, folder: Path, parallel: ParallelConfig, kind_of_state: type[ToyState]):
    with join(parallel, timeout_seconds=30) as replicas:
        Checkpoints(folder, replicas).save(kind_of_state(replicas, 1, 5), 5)


def _load(rank: int, folder: Path, parallel: ParallelConfig, inner: str, saved: int, ended: bool):
    """The kinds of state that differ from what they should be, and the counters' step."""
    with join(parallel, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        state = ToyState(replicas, 2)
        checkpoints.load(checkpoints.find("auto"), state, inner)
        wrong = set()
        for (kind, block), tensor in zip(state.blocks, state.values, strict=True):
            values = [whole(kind, block.name, k, 5)[block.slices] for k in range(saved)]
            if not torch.equal(
                tensor, _expected(kind, block, values, replicas.index, inner, ended)
            ):
                wrong.add(kind)
        return wrong, state.step, state.restored_rng


def _expected(kind, block, values, index, inner, ended) -> torch.Tensor:
    mean = torch.stack(values).double().mean(0).float()
    if kind in SHARED_KINDS:
        return values[0]
    if kind == "master":
        return whole("anchor", block.name, 0, 5)[block.slices] if ended else mean
    if index < len(values) or inner == "clone":
        return values[index % len(values)]
    return mean if inner == "mean" else torch.zeros_like(mean)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "inner"),
    [(1, 2, "clone"), (2, 4, "mean"), (3, 4, "zero"), (2, 3, "clone"), (3, 1, "clone")],
)
def test_replicas_come_and_go_by_the_stated_rules(tmp_path, before, after, inner, ended):
    kind_of_state = AtRoundEnd if ended else ToyState
    run(_save, before, tmp_path, ParallelConfig(replicas=before), kind_of_state)
    layout = ParallelConfig(replicas=after)
    results = run(_load, after, tmp_path, layout, inner, before, ended)
    assert results == [(set(), 5, None)] * after


def test_replicas_and_their_cutting_change_at_once(tmp_path):
    run(_save, 4, tmp_path, ParallelConfig(replicas=2, tp=2), AtRoundEnd)
    layout = ParallelConfig(replicas=3, dp=1)
    assert run(_load, 3, tmp_path, layout, "clone", 2, True) == [(set(), 5, None)] * 3


def _save_kinds(rank: int, folder: Path, count: int, kinds: tuple[str, ...]):
    with join(ParallelConfig(replicas=count), timeout_seconds=30) as replicas:
        Checkpoints(folder, replicas).save(ToyState(replicas, 1, 5, kinds), 5)


def _load_residuals(rank: int, folder: Path, count: int, kinds: tuple[str, ...]):
    """For each residual whether it is what was saved, and whether it is zero."""
    with join(ParallelConfig(replicas=count), timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        state = ToyState(replicas, 2, kinds=kinds)
        checkpoints.load(checkpoints.find("auto"), state)
        changed = {name.split(".")[0] for name in state.differences(5)}
        zero = all(
            tensor.count_nonzero() == 0 for kind, _, tensor in state.tensors() if kind in RESIDUAL
        )
        return not changed & set(RESIDUAL), zero


RESIDUAL = ("error_feedback", "second_error")
PLAIN = ("master", "anchor")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (2, 3, [(True, False), (True, False), (False, True)]),
        (1, 2, [(False, True), (False, True)]),
        (2, 1, [(True, True)]),
    ],
)
def test_who_joins_owes_nothing_and_a_single_replica_has_nobody_to_owe(
    tmp_path, before, after, expected
):
    kinds = {count: (*PLAIN, *RESIDUAL) if count > 1 else PLAIN for count in (1, 2, 3)}
    run(_save_kinds, before, tmp_path, before, kinds[before])
    assert run(_load_residuals, after, tmp_path, after, kinds[after]) == expected
