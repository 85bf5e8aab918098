"""`pretrain verify-resume` proves what it says, and says so when it cannot."""

import pytest

from pretrain.verify_resume import main
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    blend = write_corpus(tmp_path_factory.mktemp("corpus"))
    values = SMALL | {"data.blend": blend, "outer.interval": 3, "parallel.tp": 2}
    del values["train.steps"]
    return ["demo", *(f"{key}={value}" for key, value in values.items())]


@pytest.mark.slow
def test_a_killed_run_is_the_straight_one(small, capsys):
    assert main([*small, "--steps", "4"]) == 0
    assert "equal, bit for bit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_goes_on_with_another_layout(small, capsys):
    assert main([*small, "--resume-with", "parallel.tp=1"]) == 0
    assert "the losses agree within 0.001" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_goes_on_otherwise_is_found_out(small, capsys):
    assert main([*small, "--resume-with", "optimizer.lr=0.5"]) == 1
    assert "losses differ by more than 0.001 from step" in capsys.readouterr().err


def test_a_wrong_option_is_refused_before_anything_runs(small, capsys):
    assert main([*small, "model.heads=3"]) == 2
    assert main([*small, "--resume-with", "parallel.tp=3"]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith("error: ")


@pytest.mark.slow
def test_a_run_that_fails_is_one_line(small, tmp_path, capsys):
    assert main([*small, f"data.blend={tmp_path}/none.yaml"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: `-m launch local demo")
    assert "none.yaml is not there" in line
