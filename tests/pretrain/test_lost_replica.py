"""A lost replica takes with it what it trained on since its last outer step, and no more."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import launch.__main__ as launch
from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.rescue import put_together
from megatron_ext.checkpoint.saved import Saved
from megatron_ext.diloco.collective import Collective
from megatron_ext.errors import PeerError
from pretrain import exit, loop
from pretrain.config import load
from pretrain.session import open_session
from tests.megatron_ext.jobs import run_jobs
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, STREAMING, lines, train

INTERVAL = 4
OPTIONS = {
    "outer.interval": INTERVAL,
    "train.steps": 12,
    "train.global_batch": 12,
    "train.micro_batch": 2,
    "run.timeout_seconds": 15,
}
STEP_TOKENS = 12 * SMALL["model.sequence_length"]


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def train_until_killed(
    overrides: list[str], victims: list[tuple[int, int]], step: int, while_packing: bool
) -> str:
    """The victims die before their inner step `step`, or instead of packing what they send next.

    The others say how they ended.
    """

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    exit.quieten_imports()
    try:
        with open_session(load("demo", overrides)) as session:
            if (session.replicas.index, session.replicas.rank) in victims:
                micro_batches = session.samples.micro_batches

                def deadly(number, split="train"):
                    if number == step and while_packing:
                        Collective.reduce = die
                    elif number == step:
                        die()
                    return micro_batches(number, split)

                session.samples.micro_batches = deadly
            loop.run(session)
    except PeerError as error:
        return str(error)
    return "trained to the end"


def lose(
    blend: Path,
    folder: Path,
    victims: list[tuple[int, int]],
    step: int = 7,
    replicas: int = 3,
    tp: int = 1,
    while_packing: bool = False,
    **options: Any,
) -> list[str]:
    values = SMALL | OPTIONS | {"data.blend": blend, "run.dir": folder}
    values |= {"parallel.replicas": replicas, "parallel.tp": tp}
    values |= {key.replace("__", "."): value for key, value in options.items()}
    overrides = [f"{key}={str(v).lower() if v is True else v}" for key, v in values.items()]
    told = (overrides, victims, step, while_packing)
    return run_jobs(train_until_killed, replicas, tp, *told, may_die=victims)


def go_on(blend: Path, folder: Path, **options: Any) -> list[dict[str, Any]]:
    given = {key.replace(".", "__"): value for key, value in OPTIONS.items()}
    return train(blend, folder, **given | options)


def rescued(run: Path) -> list[tuple[int, int]]:
    return [(step, replica) for step, replica, _ in folders.parts(run / "checkpoints")]


def tensors(saved: Saved, folder: str, kind: str) -> dict[str, torch.Tensor]:
    return dict(saved.read(folder, [k for k in saved.entries(folder) if k.startswith(f"{kind}.")]))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def lost(blend, tmp_path_factory):
    """A run of three replicas without the second one, which died inside its second round."""
    run = tmp_path_factory.mktemp("lost") / "run"
    said = lose(blend, run, [(1, 0)])
    assert all("outer step 2: no sign of life from replica 1" in said[index] for index in (0, 2))
    assert rescued(run) == [(8, 0), (8, 2)]
    return run


def test_status_names_what_was_rescued(lost, capfd):
    assert launch.main(["status", str(lost)]) == 0
    out = capfd.readouterr().out
    assert "rescued: step-00000008.replica-0, step-00000008.replica-2; the next start" in out


@pytest.fixture
def run(lost, tmp_path):
    return Path(shutil.copytree(lost, tmp_path / "run"))


def test_what_the_others_trained_becomes_a_checkpoint_of_them(blend, run, tmp_path):
    parts = {replica: Saved(path) for _, replica, path in folders.parts(run / "checkpoints")}
    masters = [tensors(parts[index], f"replica-{index}", "master") for index in (0, 2)]
    path = put_together(run / "checkpoints")
    saved = Saved(path)
    assert saved.damages() == [] and saved.unknown_files() == [] and rescued(run) == []
    assert saved.layout["replicas"] == 2 and saved.step == 8
    for index in (0, 1):
        assert same(tensors(saved, f"replica-{index}", "master"), masters[index])
        (fragment,) = saved.counters(index)["outer"]["fragments"]
        assert (fragment["rounds"], fragment["since"], fragment["sent"]) == (1, INTERVAL, None)
        assert fragment["tokens"] == INTERVAL * STEP_TOKENS / 3
    # Neither anchor nor masters are anything but those of a run that lost nobody.
    train(
        blend,
        tmp_path / "whole",
        train__stop_at=7,
        parallel__replicas=3,
        **{key.replace(".", "__"): value for key, value in OPTIONS.items()},
    )
    whole = Saved(tmp_path / "whole/checkpoints/step-00000007")
    anchor = tensors(whole, "shared/anchor", "anchor")
    assert same(tensors(saved, "shared/anchor", "anchor"), anchor)
    assert not any(
        torch.equal(masters[0][k.replace("anchor", "master")], anchor[k]) for k in anchor
    )


@pytest.mark.parametrize("replicas", [3, 2])
def test_the_run_goes_on_with_or_without_the_lost_one(blend, run, replicas):
    ranks = go_on(blend, run, parallel__replicas=replicas)
    resumed = [line for line in lines(run, "events") if line["event"] == "resume"]
    assert [line["step"] for line in resumed] == [8]
    # The step whose exchange failed was trained, but never reported.
    assert [line["step"] for line in lines(run, "metrics")] == [*range(1, 8), *range(9, 13)]
    # The round of eight steps weighs each replica by what it had trained on.
    before, since = INTERVAL * STEP_TOKENS / 3, INTERVAL * STEP_TOKENS / replicas
    assert lines(run, "rounds")[-1]["tokens"] == [before + since] * replicas
    for rank in ranks[1:]:
        assert torch.equal(rank["anchor"], ranks[0]["anchor"])
    assert rescued(run) == []


@pytest.mark.parametrize(
    ("victims", "tp", "saved"),
    [
        pytest.param([(0, 0)], 1, [1, 2], id="the one that hosts the store"),
        pytest.param([(1, 1)], 2, [0, 2], id="one rank of a replica"),
    ],
)
def test_whoever_is_lost_the_others_save(blend, tmp_path, victims, tp, saved):
    said = lose(blend, tmp_path / "run", victims, tp=tp)
    assert "trained to the end" not in said
    assert rescued(tmp_path / "run") == [(8, replica) for replica in saved]


def test_fragments_in_flight_are_taken_back(blend, tmp_path):
    run = tmp_path / "run"
    lose(blend, run, [(1, 0)], step=9, replicas=2, **STREAMING)
    ((step, _),) = rescued(run)
    saved = Saved(put_together(run / "checkpoints"))
    # One fragment was sent after step 6 and applied; the other after 4, and in vain after 8.
    fragments = saved.counters()["outer"]["fragments"]
    assert step == 9 and [fragment["sent"] for fragment in fragments] == [None, None]
    trained = [fragment["tokens"] / (STEP_TOKENS / 2) for fragment in fragments]
    assert trained == [9 - 6, 9 - 4]
    ranks = go_on(blend, run, parallel__replicas=2, **STREAMING)
    assert torch.equal(ranks[0]["anchor"], ranks[1]["anchor"])


@pytest.mark.parametrize("while_packing", [False, True])
def test_nothing_is_owed_for_what_was_packed_and_never_arrived(blend, tmp_path, while_packing):
    packed = {"outer__codec": "linear", "outer__bits": 4, "outer__error_feedback": True}
    lose(blend, tmp_path / "run", [(1, 0)], replicas=2, while_packing=while_packing, **packed)
    ((_, _, path),) = folders.parts(tmp_path / "run" / "checkpoints")
    owed = tensors(Saved(path), "replica-0", "error_feedback").values()
    # What packing left out in the first round is owed still, if the second was not yet packed.
    assert any(tensor.any() for tensor in owed) != while_packing


def test_replicas_that_lost_each_other_lose_nothing(run):
    root = run / "checkpoints"
    _, _, path = folders.parts(root)[0]
    # As if the second had only been cut off, and had saved as well.
    twin = Path(shutil.copytree(path, root / folders.part_name(8, 1)))
    (twin / "replica-0").rename(twin / "replica-1")
    manifest = json.loads((twin / "manifest.json").read_text())
    rewrite_manifest(twin, lambda name: name.replace("replica-0/", "replica-1/"), manifest)
    saved = Saved(put_together(root))
    assert saved.layout["replicas"] == 3 and saved.damages() == []


def rewrite_manifest(folder: Path, rename, content: dict) -> None:
    from megatron_ext.checkpoint import manifest

    files = {rename(n): manifest.FileRecord(**entry) for n, entry in content["files"].items()}
    manifest.write(folder, manifest.Manifest(content["about"], files))


def test_an_interruption_leaves_the_parts_for_another_try(run):
    root = run / "checkpoints"
    torn = root / "step-00000008.partial"
    torn.mkdir()
    assert torn in folders.leftovers(root)
    folders.discard(torn)
    assert Saved(put_together(root)).damages() == []
    assert put_together(root) is None


def test_parts_that_newer_checkpoints_left_behind_are_removed(run, caplog):
    root = run / "checkpoints"
    shutil.copytree(root / folders.part_name(8, 0), root / folders.part_name(7, 0))
    path = put_together(root)
    assert rescued(run) == [] and "step-00000007.replica-0" in caplog.text
    shutil.copytree(path, root / folders.part_name(8, 2))
    assert put_together(root) is None and rescued(run) == []
