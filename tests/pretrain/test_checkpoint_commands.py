"""`pretrain checkpoint …` on checkpoints that real ranks wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint import Checkpoints
from megatron_ext.checkpoint.saved import Saved
from megatron_ext.replicas import ParallelConfig, join
from pretrain.checkpoint import main
from tests.megatron_ext.checkpoint.toy import KINDS, SHAPES, ToyState, whole
from tests.ranks import run

LAYOUT = ParallelConfig(replicas=2, tp=2)


def _save(rank: int, folder: Path, steps: list[int]):
    with join(LAYOUT, timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder, replicas)
        for step in steps:
            checkpoints.save(ToyState(replicas, step, step), step)


@pytest.fixture
def a_run(tmp_path) -> Path:
    """A run's folder with two checkpoints, cut differently."""
    run(_save, 4, tmp_path / "run/checkpoints", [5, 10])
    return tmp_path / "run"


def _json(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_tells_what_is_in_the_newest_checkpoint(a_run, capsys):
    content = _json(capsys, "inspect", str(a_run))
    assert content["step"] == 10
    assert content["checkpoints"] == ["step-00000005", "step-00000010"]
    assert content["layout"]["replicas"] == content["layout"]["tp"] == 2
    assert content["counters"]["tokens"] == 10_000
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert {(row["folder"], row["kind"]): row["elements"] for row in content["kinds"]} == {
        ("replica-0", "master"): elements,
        ("replica-0", "momentum"): elements,
        ("replica-1", "master"): elements,
        ("replica-1", "momentum"): elements,
        ("shared/anchor", "anchor"): elements,
        ("shared/outer_momentum", "outer_momentum"): elements,
    }
    assert main(["inspect", str(a_run / "checkpoints/step-00000005"), "--tensors"]) == 0
    said = capsys.readouterr().out
    for word in ("step 5", "layers.0.attention.q", "8 × 8", "tokens: 5000"):
        assert word in said


def test_verify_finds_nothing_wrong_with_what_was_just_saved(a_run, capsys):
    results = _json(capsys, "verify", str(a_run))
    assert results["latest"] is None
    assert [
        (Path(found["path"]).name, found["damages"], found["unknown_files"])
        for found in results["checkpoints"]
    ] == [("step-00000005", [], []), ("step-00000010", [], [])]


def test_verify_names_the_damaged_file_on_one_line_and_ends_with_3(a_run):
    victim = next(a_run.glob("checkpoints/step-00000005/replica-1/*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    ended = subprocess.run(
        [sys.executable, "-m", "pretrain", "checkpoint", "verify", str(a_run)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 3
    assert "step-00000010: ok" in ended.stdout
    [line] = ended.stderr.strip().splitlines()
    assert line.startswith("error: 1 of 2 checkpoints damaged")
    assert f"replica-1/{victim.name}" in line


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("step-00000005")])
def test_verify_sees_a_wrong_latest(a_run, capsys, damage):
    damage(a_run / "checkpoints/latest")
    assert main(["verify", str(a_run)]) == 3
    assert "latest" in capsys.readouterr().err
    assert main(["verify", str(a_run / "checkpoints/step-00000005")]) == 0


def test_verify_of_something_else_ends_with_3(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 3
    assert capsys.readouterr().err == f"error: {tmp_path}: there is no checkpoint there\n"


def test_diff_ranks_what_differs_and_is_silent_about_what_does_not(a_run, capsys):
    first, second = (a_run / f"checkpoints/step-000000{step}" for step in ("05", "10"))
    assert _json(capsys, "diff", str(first), str(first))["tensors"] == []
    tensors = _json(capsys, "diff", str(first), str(second))["tensors"]
    assert len(tensors) == (2 * 2 + 2) * len(SHAPES)
    relative = [row["relative"] for row in tensors]
    assert relative == sorted(relative, reverse=True)
    row = next(row for row in tensors if row["key"] == "anchor.embedding")
    one, other = (whole("anchor", "embedding", 0, step).double() for step in (5, 10))
    assert row["largest"] == (one - other).abs().max().item()
    assert row["relative"] == pytest.approx(((one - other).norm() / one.norm()).item())
    only = _json(capsys, "diff", str(first), str(second), "--kind", "anchor")["tensors"]
    assert {row["key"].split(".")[0] for row in only} == {"anchor"}
    assert main(["diff", str(first), str(second), "--top", "3"]) == 0
    assert "24 tensors differ, 3 are shown" in capsys.readouterr().out


def test_one_process_reads_whole_tensors_whatever_their_cutting(a_run):
    saved = Saved(a_run / "checkpoints/step-00000010")
    weights = dict(saved.global_weights())
    assert weights.keys() == SHAPES.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, whole("anchor", name, 0, 10))
    for kind in KINDS[:2]:
        [(_, tensor)] = saved.read("replica-1", [f"{kind}.embedding"])
        assert torch.equal(tensor, whole(kind, "embedding", 1, 10))


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["diff", "one"], ["inspect", "--what"]])
def test_wrong_use_is_one_line_and_ends_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
