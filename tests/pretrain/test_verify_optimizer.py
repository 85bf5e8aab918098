"""`verify-optimizer` and the self-check, as a user meets them."""

import pytest

import launch.__main__ as launch
import pretrain.__main__ as pretrain
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, train
from tests.ranks import run

SMALL = ["model.layers=2", "model.hidden=64", "model.ffn=96", "model.vocab_size=64"]


def on_a_layout(*arguments: str) -> int:
    return launch.main(["local", "verify-optimizer", "demo", *arguments, *SMALL])


def alone(*arguments: str) -> int:
    """In a process of its own, which the command makes a world of one."""
    command = ["verify-optimizer", "demo", *arguments, *SMALL]
    [code] = run(lambda rank: pretrain.main(command), 1)
    return code


@pytest.mark.parametrize(
    ("verify", "arguments"),
    [(on_a_layout, ["--tp", "2", "--replicas", "2"]), (alone, [])],
    ids=["launch", "pretrain"],
)
def test_the_table_has_a_line_for_each_block_and_a_verdict(verify, arguments, capfd):
    assert verify(*arguments) == 0
    head, *rows, verdict = capfd.readouterr().out.splitlines()
    assert head.split()[:5] == ["parameter", "size", "optimizer", "rank", "cosine"]
    assert [row.split()[0] for row in rows].count("layers.1.mlp.down") == 1
    assert f"{len(rows)} blocks follow the float64 reference" in verdict


def test_an_update_under_the_bound_ends_with_exit_code_3(capfd):
    """Two hundred iterations in BF16 drift away from those in float64."""
    many = ["optimizer.coefficients=simple", "optimizer.newton_schulz_steps=200"]
    assert alone(*many) == 3
    (line,) = capfd.readouterr().err.splitlines()
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
