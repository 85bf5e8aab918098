"""The resume doctor's rules: what differs is honoured, allowed by name, or refused by name."""

import pytest

from megatron_ext.errors import ConfigError
from pretrain.config import fields, load
from pretrain.doctor import examine, refuse, table_text

SAVED = {key: value for key, value, _ in load("demo", ["data.blend=a"]).leaves()}
SAVED |= {"data": "one", "tokenizer": "one", "routing embedding": "adamw"}


def findings(allow=(), **changes):
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return examine(SAVED, SAVED | changes, allow)


def refused(allow=(), **changes) -> list[str]:
    return [found.name for found in findings(allow, **changes) if found.refused]


def test_what_does_not_decide_what_is_computed_may_change_unsaid():
    assert findings(run__dir="b", data__blend="b", train__stop_at=3, checkpoint__every=7) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer.lr", 0.1),
        ("optimizer.schedule", "constant"),
        ("train.steps", 1000),
        ("train.precision", "bf16"),
        ("parallel.tp", 4),
        ("parallel.replicas", 8),
        ("outer.lr", 0.1),
    ],
)
def test_honoured(name, value):
    (found,) = findings(**{name: value})
    assert (found.name, found.checkpoint, found.requested) == (name, SAVED[name], value)
    assert found.effective == value and not found.refused and found.rule
    assert name in table_text([found])


@pytest.mark.parametrize(
    ("name", "value", "allowance"),
    [
        ("model.sequence_length", 32, "model.sequence_length"),
        ("model.rope_base", 7, "model.rope_base"),
        ("train.global_batch", 64, "train.global_batch"),
        ("train.seed", 1, "train.seed"),
        ("data", "other", "data"),
        ("tokenizer", "other", "tokenizer"),
        ("routing embedding", "muon", "routing"),
    ],
)
def test_refused_by_name_unless_it_is_allowed_by_name(name, value, allowance):
    found = findings(**{name: value})
    with pytest.raises(ConfigError, match=rf"{name} is .*resume.allow=\[{allowance}\]"):
        refuse(found, "a checkpoint")
    assert refused([allowance], **{name: value}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.hidden", 8),
        ("optimizer.name", "adamw"),
        ("optimizer.normuon", True),
        ("outer.interval", 0),
        ("outer.delay", 2),
        ("outer.fragments", 3),
        ("outer.optimizer", "sgd"),
    ],
)
def test_what_no_checkpoint_can_carry_over_is_refused_whatever_is_allowed(name, value):
    found = findings(**{name: value})
    assert [each.name for each in found if each.refused] == [name]
    with pytest.raises(ConfigError) as raised:
        refuse(found, "a checkpoint")
    assert "resume.allow" not in str(raised.value)


def test_a_number_may_change_where_only_its_being_zero_matters():
    assert refused(outer__interval=SAVED["outer.interval"] + 1) == []


def test_a_misspelt_allowance_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"resume.allow names train.seeds, .*train.seed"):
        findings(["train.seeds"])


def test_every_option_falls_under_a_rule():
    everything = {key: f"another {value}" for key, value in SAVED.items()}
    names = {found.name for found in examine(SAVED, everything, [])}
    unsaid = {"run", "checkpoint", "resume", "validation"}
    left_out = {key for key in fields() if key.split(".")[0] not in unsaid} - names
    placed = {"data.blend", "data.cache", "train.stop_at", "train.log_every"}
    assert left_out == placed | {"train.fused_gradients"}
