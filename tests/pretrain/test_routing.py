"""A run tells its routing, and goes on only with the same."""

import json

import pytest
import torch

from megatron_ext.errors import ConfigError
from pretrain.config import load
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, train

RULES = '[{match: "*.attention.v", lr_factor: 0.5}]'


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_the_folder_holds_a_row_for_each_parameter_with_its_home(blend, tmp_path, capfd):
    train(blend, tmp_path, train__steps=1, parallel__tp=2, optimizer__rules=RULES)
    rows = {row["name"]: row for row in json.loads((tmp_path / "routing.json").read_text())}
    assert len(rows) == 3 + 13 * SMALL["model.layers"]
    v = rows["layers.1.attention.v"]
    assert (v["optimizer"], v["split"], v["lr_factor"]) == ("muon", "q+k+v", 0.5)
    assert v["reason"] == "2-D in layer, rule *.attention.v"
    homes = [tuple(row["owners"]) for row in rows.values() if row["optimizer"] == "muon"]
    assert set(homes) == {(0,), (1,)}
    assert rows["embedding"]["owners"] == [0, 1]
    (line,) = (line for line in capfd.readouterr().out.splitlines() if "*.attention.v" in line)
    assert line.split()[:4] == ["muon", "4", "0.5", "0"]
    assert line.endswith("layers.0-3.attention.v")


def test_another_routing_is_refused_with_what_differs(blend, tmp_path):
    train(blend, tmp_path, train__stop_at=1)
    with pytest.raises(ConfigError) as caught:
        train(blend, tmp_path, optimizer__rules=RULES)
    message = str(caught.value)
    assert "routing layers.0-3.attention.v is scale 1, lr × 0.5" in message
    assert "attention.q" not in message
    assert "resume.allow=[routing]" in message


def test_another_optimizer_for_some_is_refused_by_their_names_before_a_tensor_is_missed(
    blend, tmp_path
):
    train(blend, tmp_path, train__stop_at=1)
    rules = '[{match: "layers.1.*", optimizer: adamw}]'
    with pytest.raises(ConfigError) as caught:
        train(blend, tmp_path, optimizer__rules=rules, resume__allow="[routing]")
    message = str(caught.value)
    assert "optimizer of layers.1.attention.v is adamw" in message
    assert "resume.weights" in message
    assert "resume.allow" not in message


def test_rules_are_read_from_the_command_line_and_written_back():
    config = load("demo", [f"optimizer.rules={RULES}"]).config
    assert config.optimizer.rules[0].lr_factor == 0.5


def test_a_wrong_rule_says_what_rules_have():
    with pytest.raises(ConfigError, match="a list, each a mapping of match, optimizer, lr_factor"):
        load("demo", ['optimizer.rules=[{match: "*", lr: 2}]'])


def test_normuons_moment_is_saved_and_resumed_bit_for_bit(blend, tmp_path):
    options = {"optimizer__normuon": True, "parallel__tp": 2, "train__steps": 4}
    straight = train(blend, tmp_path / "straight", **options)
    train(blend, tmp_path / "stopped", train__stop_at=2, **options)
    stopped = train(blend, tmp_path / "stopped", **options)
    for one, other in zip(straight, stopped, strict=True):
        for (block, mine), (_, theirs) in zip(one["masters"], other["masters"], strict=True):
            assert torch.equal(mine, theirs), block.name
