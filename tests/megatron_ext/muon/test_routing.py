"""What each parameter gets by default and by rules, and how it is told."""

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.model import ModelConfig, logical_shapes
from megatron_ext.muon.config import OptimizerConfig, Rule
from megatron_ext.muon.routing import fold, identity, route_all

MODEL = ModelConfig(
    layers=4, hidden=64, heads=4, kv_heads=1, ffn=96, vocab_size=48, sequence_length=32
)


def routes(*rules: Rule, model: ModelConfig = MODEL, **options):
    return route_all(model, OptimizerConfig(lr=0.1, rules=rules, **options))


def test_matrices_of_layers_go_to_muon_and_all_else_to_adamw():
    found = routes()
    assert set(found) == set(logical_shapes(MODEL))
    muon = {name.split(".", 2)[2] for name, route in found.items() if route.optimizer == "muon"}
    attention = {f"attention.{part}" for part in "qkvo"}
    assert muon == attention | {"mlp.gate", "mlp.up", "mlp.down"}
    assert {"embedding", "head", "final_norm"} <= {
        name for name, route in found.items() if route.optimizer == "adamw"
    }


def test_each_expert_has_matrices_of_its_own_and_the_router_goes_to_adamw():
    model = MODEL.model_copy(update={"experts": 3})
    found = routes(Rule(match="*.experts.1.down", lr_factor=0.5), model=model)
    expert = {f"layers.2.experts.{index}.{part}" for index in range(3) for part in ("gate", "up")}
    assert {found[name].optimizer for name in expert} == {"muon"}
    assert (found["layers.2.router"].optimizer, found["layers.2.router"].reason) == (
        "adamw",
        "router",
    )
    assert found["layers.2.experts.1.down"].lr_factor == 0.5
    assert "layers.2.mlp.up" not in found
    folded = fold({name: route.lr_factor for name, route in found.items()})
    assert folded["layers.0-3.experts.0,2.down"] == 1.0
    assert folded["layers.0-3.experts.1.down"] == 0.5
    assert folded["layers.0-3.experts.0-2.up"] == 1.0


def test_a_matrix_of_one_row_goes_to_adamw():
    narrow = ModelConfig(
        layers=1, hidden=4, heads=2, kv_heads=1, ffn=1, vocab_size=8, sequence_length=4
    )
    found = routes(model=narrow)["layers.0.mlp.up"]
    assert (found.optimizer, found.reason) == ("adamw", "one row or column")


def test_the_last_rule_that_matches_decides_and_is_the_reason():
    found = routes(
        Rule(match="layers.*.attention.?", lr_factor=0.5, weight_decay=0.1),
        Rule(match="layers.2.*", optimizer="adamw"),
        Rule(match="*.attention.v", lr_factor=2.0),
    )
    q, v = found["layers.0.attention.q"], found["layers.2.attention.v"]
    assert (q.optimizer, q.lr_factor, q.weight_decay) == ("muon", 0.5, 0.1)
    assert q.reason == "2-D in layer, rule layers.*.attention.?"
    assert (v.optimizer, v.lr_factor, v.weight_decay, v.scale) == ("adamw", 2.0, 0.1, 1.0)
    assert v.reason == "rule layers.2.*, rule *.attention.v"


@pytest.mark.parametrize("name", ["embedding", "head", "final_norm", "*.q_norm", "*.router"])
def test_muon_is_refused_for_what_is_no_matrix_of_a_layer(name):
    with pytest.raises(ConfigError, match="which is for matrices inside layers"):
        routes(Rule(match=name, optimizer="muon"), model=MODEL.model_copy(update={"experts": 2}))


def test_a_rule_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"'layers\.9\.\*' matches no parameter"):
        routes(Rule(match="layers.9.*", lr_factor=0.5))


@pytest.mark.parametrize("rule", [{"match": "*"}, {"lr_factor": 0.5}], ids=str)
def test_a_rule_that_says_nothing_is_refused(rule):
    with pytest.raises(ConfigError, match=r"optimizer\.rules"):
        Rule(**rule)


def test_heads_are_split_only_where_they_are():
    found = routes(model=MODEL.model_copy(update={"attention_gate": True}), per_head=True)
    heads = {part: found[f"layers.0.attention.{part}"].heads for part in ("q", "gate", "k", "o")}
    assert heads == {"q": 4, "gate": 4, "k": 1, "o": 1}
    q = found["layers.0.attention.q"]
    assert q.part((64, 64)) == (16, 64)
    assert q.scale == pytest.approx((16 / 64) ** 0.5)


def test_layers_fold_where_they_are_alike():
    folded = fold({f"layers.{index}.up": index == 2 for index in range(5)} | {"head": True})
    assert folded == {"layers.0-1,3-4.up": False, "layers.2.up": True, "head": True}


def test_identity_tells_every_change_of_a_route_and_no_layout():
    changes = [
        Rule(match="layers.0.mlp.up", optimizer="adamw"),
        Rule(match="layers.0.mlp.up", lr_factor=0.5),
        Rule(match="layers.0.mlp.up", weight_decay=0.5),
    ]
    texts = {str(identity(routes(rule))) for rule in changes}
    texts |= {str(identity(routes(scale="spectral"))), str(identity(routes(per_head=True)))}
    assert len(texts | {str(identity(routes()))}) == 6
