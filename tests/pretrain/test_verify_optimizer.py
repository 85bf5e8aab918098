"""`verify-optimizer` and the self-check, as a user meets them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, train

ROOT = Path(__file__).parents[2]
SMALL = ["model.layers=2", "model.hidden=64", "model.ffn=96", "model.vocab_size=64"]


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *arguments, *SMALL],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.parametrize(
    "start",
    [
        ["launch", "local", "verify-optimizer", "demo", "--tp", "2", "--replicas", "2"],
        ["pretrain", "verify-optimizer", "demo"],
    ],
    ids=lambda start: start[0],
)
def test_the_table_has_a_line_for_each_block_and_a_verdict(start):
    result = command(*start)
    assert result.returncode == 0, result.stderr
    head, *rows, verdict = result.stdout.splitlines()
    assert head.split()[:5] == ["parameter", "size", "optimizer", "rank", "cosine"]
    assert [row.split()[0] for row in rows].count("layers.1.mlp.down") == 1
    assert f"{len(rows)} blocks follow the float64 reference" in verdict


def test_an_update_under_the_bound_ends_with_exit_code_3():
    """Two hundred iterations in BF16 drift away from those in float64."""
    result = command(
        "pretrain", "verify-optimizer", "demo", "optimizer.coefficients=simple",
        "optimizer.newton_schulz_steps=200",
    )  # fmt: skip
    assert result.returncode == 3, result.stdout
    (line,) = result.stderr.splitlines()
    assert "is not that of the float64 reference; worst is layers." in line


def test_a_run_with_the_self_check_is_the_run_without(tmp_path):
    blend = write_corpus(tmp_path)
    layout = {"train__steps": 3, "parallel__tp": 2, "parallel__dp": 2, "train__overlap": True}
    for name, checks in (("with", True), ("without", False)):
        train(blend, tmp_path / name, optimizer__self_check=checks, **layout)
    one, other = (
        [(line["loss"], line["grad_norm"]) for line in lines(tmp_path / name, "metrics")]
        for name in ("with", "without")
    )
    assert one == other
