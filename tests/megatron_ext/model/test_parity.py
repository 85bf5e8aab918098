"""Every layout computes the loss and the gradients of the float64 reference."""

from functools import cache

import pytest

from megatron_ext.model import ModelConfig
from megatron_ext.replicas import ParallelConfig
from tests.megatron_ext.model.step import Step, megatron_step, model_config, reference_step

reference = cache(reference_step)

LAYOUTS = {
    "one process": ParallelConfig(),
    "dp 2": ParallelConfig(dp=2),
    "tp 2": ParallelConfig(tp=2),
    "tp 2, sequence": ParallelConfig(tp=2, sequence_parallel=True),
    "pp 2": ParallelConfig(pp=2),
    "pp 2, interleaved": ParallelConfig(pp=2, interleave=2),
    "pp 4": ParallelConfig(pp=4),
    "tp 2, sequence, pp 2, interleaved": ParallelConfig(
        tp=2, pp=2, interleave=2, sequence_parallel=True
    ),
}
MODELS = {
    "the zoo's": {},
    "grouped queries": {"kv_heads": 2},
    "tied head": {"tie_head": True},
    "no sandwich norms": {"sandwich_norm": False},
    "gated attention": {"attention_gate": True},
    "document masking": {"document_masking": True},
    "all of them": {
        "kv_heads": 2,
        "tie_head": True,
        "sandwich_norm": False,
        "attention_gate": True,
        "document_masking": True,
    },
}


def check(step: Step, model: ModelConfig, loss: float = 1e-6, gradient: float = 1e-5) -> None:
    """Loss and gradient norm relative; each gradient relative to its matrix's largest element."""
    expected = reference(model)
    assert step.loss == pytest.approx(expected.loss, rel=loss)
    assert step.norm == pytest.approx(expected.norm, rel=loss)
    assert step.gradients.keys() == expected.gradients.keys()
    for name, whole in expected.gradients.items():
        difference = (step.gradients[name] - whole).abs().max() / whole.abs().max()
        assert difference <= gradient, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_neither_loss_nor_gradients(layout):
    model = model_config()
    check(megatron_step(model, LAYOUTS[layout]), model)


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("layout", ["one process", "tp 2, sequence, pp 2, interleaved"])
def test_model_variants_match_the_reference(variant, layout):
    model = model_config(**MODELS[variant])
    check(megatron_step(model, LAYOUTS[layout]), model)


@pytest.mark.parametrize("attention_gate", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_more_ranks_than_key_heads(sequence_parallel, attention_gate):
    model = model_config(kv_heads=2, attention_gate=attention_gate)
    check(
        megatron_step(model, ParallelConfig(tp=4, sequence_parallel=sequence_parallel)),
        model,
    )


EXPERTS = {
    "two of five": {"experts": 5},
    "one of four, unbalanced, tied, gated": {
        "experts": 4,
        "experts_per_token": 1,
        "router_balance": 0.0,
        "tie_head": True,
        "attention_gate": True,
    },
    "all of three, documents": {
        "experts": 3,
        "experts_per_token": 3,
        "router_balance": 10.0,
        "document_masking": True,
    },
}
OF_EXPERTS = {
    **{name: LAYOUTS[name] for name in LAYOUTS if name != "tp 2"},
    "tp 2, sequence, dp 2": ParallelConfig(tp=2, dp=2, sequence_parallel=True),
    "tp 2, sequence, pp 2, dp 2": ParallelConfig(tp=2, pp=2, dp=2, sequence_parallel=True),
    "ep 2": ParallelConfig(dp=2, ep=2),
    "ep 2, dp 4": ParallelConfig(dp=4, ep=2),
    "ep 4": ParallelConfig(dp=4, ep=4),
    "ep 2, tp 2, sequence": ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True),
    "ep 2, tp 2, sequence, pp 2, interleaved": ParallelConfig(
        tp=2, pp=2, interleave=2, dp=2, ep=2, sequence_parallel=True
    ),
}


@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_experts_match_the_reference_on_every_layout(layout):
    model = model_config(experts=4, router_balance=0.1)
    check(megatron_step(model, OF_EXPERTS[layout]), model)


@pytest.mark.parametrize("variant", EXPERTS)
@pytest.mark.parametrize("layout", ["one process", "tp 2, sequence, pp 2, interleaved"])
def test_variants_of_experts_match_the_reference(variant, layout):
    model = model_config(**EXPERTS[variant])
    check(megatron_step(model, LAYOUTS[layout]), model)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("layout", ["tp 2, sequence, pp 2, interleaved", "ep 4"])
def test_recomputing_experts_changes_nothing(layout, recompute):
    model = model_config(experts=4, router_balance=0.1)
    check(megatron_step(model, OF_EXPERTS[layout], recompute=recompute), model)


@pytest.mark.parametrize("ep", [1, 2])
def test_an_expert_that_no_token_chose_has_a_gradient_of_zero(ep):
    model = model_config(experts=64, sequence_length=4, experts_per_token=1)
    step = megatron_step(model, ParallelConfig(dp=2, ep=ep))
    gradients = [step.gradients[f"layers.0.experts.{index}.down"] for index in range(64)]
    idle = [not gradient.any() for gradient in gradients]
    assert any(idle) and not all(idle)
    expected = reference(model)
    assert step.loss == pytest.approx(expected.loss, rel=1e-6)
    assert step.norm == pytest.approx(expected.norm, rel=1e-6)


def test_tied_head_over_four_stages():
    model = model_config(tie_head=True)
    check(megatron_step(model, ParallelConfig(pp=4)), model)


def test_interleaved_four_stages():
    model = model_config(layers=8)
    check(megatron_step(model, ParallelConfig(pp=4, interleave=2)), model)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(recompute):
    model = model_config()
    layout = LAYOUTS["tp 2, sequence, pp 2, interleaved"]
    check(megatron_step(model, layout, recompute=recompute), model)


def test_bf16_parameters_stay_close():
    model = model_config()
    step = megatron_step(model, ParallelConfig(tp=2, pp=2), precision="bf16")
    check(step, model, loss=1e-2, gradient=0.1)
