"""A run's records when it goes on from an earlier step."""

import json

import pytest

from megatron_ext.errors import DataError
from pretrain.log import RunLog


def metrics(folder, *lines: str):
    (folder / "metrics.jsonl").write_text("".join(lines))
    RunLog(folder, step=2).close()
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


def test_steps_that_come_again_and_half_a_line_are_dropped(tmp_path):
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    assert metrics(tmp_path, *lines, '{"step": 4, "lo') == [1, 2]


def test_a_damaged_line_is_named(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl: not a JSON object: .\?\?"):
        metrics(tmp_path, '{"step": 1}\n', "??\n")
