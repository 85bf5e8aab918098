"""Checkpoints that are written while training goes on are the ones it would have stopped for."""

import resource

from megatron_ext.checkpoint.saved import Saved, differences
from pretrain import loop
from pretrain.config import load
from pretrain.session import open_session
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, lines, losses, train
from tests.ranks import run

STEPS = 6
OPTIONS = {
    "parallel__replicas": 2,
    "parallel__tp": 2,
    "outer__interval": 3,
    "train__steps": STEPS,
    "checkpoint__every": 1,
    "checkpoint__keep_last": STEPS,
}


def test_background_saves_hold_the_same_bits_at_every_step_of_a_round(tmp_path):
    blend = write_corpus(tmp_path)
    for folder, background in (("waiting", False), ("going on", True)):
        train(blend, tmp_path / folder, checkpoint__background=background, **OPTIONS)
    assert losses(tmp_path / "waiting") == losses(tmp_path / "going on")
    for step in range(1, STEPS + 1):
        waiting, going_on = (
            Saved(tmp_path / folder / f"checkpoints/step-{step:08d}")
            for folder in ("waiting", "going on")
        )
        assert list(differences(waiting, going_on, [])) == []
        one, other = (saved.counters() for saved in (waiting, going_on))
        differing = {key for key in one["options"] if one["options"][key] != other["options"][key]}
        assert differing == {"run.dir", "data.cache", "checkpoint.background"}
        assert one | {"options": {}} == other | {"options": {}}
    saved = [
        e["step"] for e in lines(tmp_path / "going on", "events") if e["event"] == "checkpoint"
    ]
    assert saved == list(range(1, STEPS + 1))


def _train_with_a_full_disk(rank: int, overrides: list[str]) -> None:
    """The disk is full for the checkpoint of step 2, on one rank."""
    with open_session(load("demo", overrides)) as session:
        record, unlimited = session.record, resource.getrlimit(resource.RLIMIT_FSIZE)

        def full_at_step_two(*arguments, **named) -> None:
            limit = 8000 if rank == 1 and session.state.step in (2, 3) else unlimited[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
            record(*arguments, **named)

        session.record = full_at_step_two
        loop.run(session)


def test_a_background_save_that_fails_is_reported_and_the_run_goes_on(tmp_path):
    options = SMALL | {key.replace("__", "."): value for key, value in OPTIONS.items()}
    options |= {"data.blend": write_corpus(tmp_path), "run.dir": tmp_path / "run"}
    options |= {"checkpoint.every": 2, "checkpoint.background": "true"}
    run(_train_with_a_full_disk, 4, [f"{key}={value}" for key, value in options.items()])
    events = lines(tmp_path / "run", "events")
    [failed] = [event for event in events if event["event"] == "checkpoint failed"]
    assert failed["step"] == 2
    assert "File too large" in failed["error"]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [4, 6]
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["latest", "step-00000004", "step-00000006"]
