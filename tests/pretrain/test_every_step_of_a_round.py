"""From whatever step of a round a run is resumed, it goes on bit for bit.

Each step is saved in one launch; the same processes then load one after another, each time into a
state that was spoilt, and train on to the end.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint import Checkpoints
from pretrain import exit, loop
from pretrain.config import load
from pretrain.session import Session, open_session
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL
from tests.ranks import run

INTERVAL = 4
FIRST, LAST = INTERVAL, 2 * INTERVAL + 2
"""The steps to resume from: a whole round, and the steps after it."""

ROUND = {"parallel.replicas": 2, "outer.interval": INTERVAL}
STREAMING = ROUND | {"outer.fragments": 2, "outer.delay": 1, "outer.mix": 0.5}
PACKED = {"outer.codec": "linear", "outer.bits": 4, "outer.error_feedback": True}
ADAMW = {"optimizer.name": "adamw", "optimizer.lr": 0.005}


@pytest.mark.parametrize(
    "options",
    [
        ROUND,
        pytest.param(ROUND | ADAMW, marks=pytest.mark.slow),
        pytest.param(STREAMING | PACKED | {"train.precision": "bf16"}, marks=pytest.mark.slow),
        STREAMING | PACKED | ADAMW | {"outer.second_error_feedback": True},
        pytest.param(ROUND | {"parallel.tp": 2}, marks=pytest.mark.slow),
    ],
    ids=["MuLoCo", "DiLoCo", "streaming MuLoCo, bf16, EF", "streaming DiLoCo, both EF", "tp 2"],
)
def test_going_on_from_every_step_of_a_round_changes_no_bit(tmp_path, options):
    steps = LAST + 2
    values = SMALL | {"data.blend": write_corpus(tmp_path), "run.dir": tmp_path / "run"}
    values |= {"train.steps": steps, "checkpoint.every": 1, "checkpoint.keep_last": steps}
    overrides = [f"{key}={str(value).lower()}" for key, value in (values | options).items()]
    world_size = load("demo", overrides).config.parallel.world_size
    for differing in run(_save_all_and_resume_each, world_size, overrides, timeout=200):
        assert differing == {step: [] for step in range(FIRST, LAST + 1)}


def _save_all_and_resume_each(rank: int, overrides: list[str]) -> dict[int, list[str]]:
    """By the step resumed from: what is not, at the end, as in the run without a stop."""
    exit.quieten_imports()
    with open_session(load("demo", overrides)) as session:
        straight = _watch_losses(session)
        loop.run(session)
        end = _snapshot(session)
        losses = dict(straight)
        session.save = lambda last: None
        folder = Path(session.config.run.dir) / "checkpoints"
        checkpoints = Checkpoints(folder, session.replicas)
        return {
            step: _resume(session, checkpoints, folder / f"step-{step:08d}", straight, losses, end)
            for step in range(FIRST, LAST + 1)
        }


def _resume(session, checkpoints, path: Path, watched: dict, losses: dict, end: dict) -> list[str]:
    for _, _, tensor in session.state.tensors():
        tensor.fill_(torch.nan)
    torch.manual_seed(int(path.name[-2:]))
    watched.clear()
    checkpoints.load(path, session.state)
    loop.run(session)
    wrong = [name for name, value in _snapshot(session).items() if not _equal(value, end[name])]
    return wrong + [f"loss {step}" for step, loss in watched.items() if loss != losses[step]]


def _watch_losses(session: Session) -> dict[int, float]:
    watched: dict[int, float] = {}
    record = session.record

    def watch(loss: float, *others: Any) -> None:
        watched[session.state.step] = loss
        record(loss, *others)

    session.record = watch
    return watched


def _snapshot(session: Session) -> dict[str, Any]:
    """Everything that a checkpoint holds, the random states too."""
    if session.outer:
        session.outer.settle()
    state = session.state
    found = {f"{kind}.{block}": tensor.clone() for kind, block, tensor in state.tensors()}
    return found | {"rng": state.rng(), "counters": state.counters()}


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _draw_and_come_back(rank: int, overrides: list[str]) -> bool:
    """Whether random numbers after a load are those that came after the save."""
    exit.quieten_imports()
    with open_session(load("demo", overrides)) as session:
        checkpoints = Checkpoints(Path(session.config.run.dir) / "other", session.replicas)
        checkpoints.save(session.state, 0)
        after_save = torch.rand(5)
        torch.manual_seed(99)
        checkpoints.load(checkpoints.find("auto"), session.state)
        return torch.equal(torch.rand(5), after_save)


def test_random_numbers_go_on_where_they_were(tmp_path):
    values = SMALL | {"data.blend": write_corpus(tmp_path), "run.dir": tmp_path / "run"}
    values |= {"parallel.dp": 2}
    assert run(_draw_and_come_back, 2, [f"{k}={v}" for k, v in values.items()]) == [True, True]
