"""Segments of all tensor-parallel ranks tile every logical matrix and every rank's parameter."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ext import host
from megatron_ext.model import ModelConfig, build, describe, logical_shapes, skeleton
from megatron_ext.model.logical import (
    LogicalParameter,
    UnknownParameterError,
    describe_parameter,
    kind_of,
)
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.megatron_ext.model.step import model_config
from tests.ranks import run


@pytest.fixture(scope="module", autouse=True)
def _megatron_without_cuda():
    host.prepare()


def described(model: ModelConfig, tp: int) -> list[LogicalParameter]:
    """Every parameter of the whole model, as cut by `tp`."""
    names = (name for name, _ in skeleton(model).named_parameters())
    return [describe_parameter(name, model, tp) for name in names]


@st.composite
def layouts(draw) -> tuple[ModelConfig, int]:
    """Models and tensor-parallel sizes, with tp above, at and below kv_heads."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = math.lcm(tp, kv_heads) * draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from([2, 6]))
    attention_gate = draw(st.booleans())
    assume(((1 + attention_gate) * heads + 2 * kv_heads) * head_dim % tp == 0)
    model = model_config(
        layers=2,
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        ffn=tp * draw(st.integers(1, 5)),
        vocab_size=tp * draw(st.integers(1, 5)),
        attention_gate=attention_gate,
        sandwich_norm=draw(st.booleans()),
        tie_head=draw(st.booleans()),
        experts=draw(st.sampled_from([0, 2, 3])),
    )
    return model, tp


@settings(max_examples=40)
@given(layouts())
def test_segments_tile_every_parameter_exactly_once(layout):
    model, tp = layout
    seen = {name: torch.zeros(shape) for name, shape in logical_shapes(model).items()}
    for logical in described(model, tp):
        ranks = [0] if logical.replicated else range(tp)
        for tp_rank in ranks:
            local = torch.zeros(logical.local_shape)
            for segment in logical.segments_of(tp_rank):
                assert segment.shape == logical.shapes[segment.name]
                seen[segment.name][segment.slices] += 1
                local[segment.local_slices] += 1
            assert (local == 1).all(), (logical.names, tp_rank)
    for name, count in seen.items():
        assert (count == 1).all(), name


def test_replicated_parameters_are_the_same_on_every_rank():
    for logical in described(model_config(experts=2), tp=4):
        if logical.replicated:
            assert logical.kind in ("norm", "router")
            assert logical.segments_of(0) == logical.segments_of(3)


def test_kinds_follow_the_names():
    kinds = {name: kind_of(name) for name in logical_shapes(model_config(layers=1, experts=2))}
    assert kinds["embedding"] == "embedding"
    assert kinds["layers.0.router"] == "router"
    assert kinds["head"] == "head"
    matrices = {name.split(".")[-1] for name, kind in kinds.items() if kind == "matrix"}
    assert matrices == {"q", "k", "v", "o", "gate", "up", "down"}


def test_rows_that_ranks_cannot_share_equally_are_refused():
    model = model_config(hidden=16, heads=8, kv_heads=1)
    with pytest.raises(ValueError, match=r"attention\.q.*20 rows .* 8 tensor-parallel"):
        described(model, tp=8)


def test_a_rank_outside_the_layout_is_refused():
    with pytest.raises(ValueError, match="rank 2 of 2"):
        described(model_config(), tp=2)[0].segments_of(2)


def test_a_parameter_of_unknown_split_is_refused_by_name():
    model = model_config()
    built = skeleton(model)
    layer = built.decoder.layers[1].self_attention
    layer.linear_gate = torch.nn.Linear(4, 4, bias=False, device="meta")
    with pytest.raises(UnknownParameterError, match=r"layers\.1\.self_attention\.linear_gate"):
        describe([built], model, ParallelConfig())


def test_a_fused_weight_of_another_shape_is_refused_by_name():
    model = model_config()
    built = skeleton(model)
    built.decoder.layers[2].mlp.linear_fc1.weight = torch.nn.Parameter(
        torch.empty(3 * model.ffn, model.hidden, device="meta")
    )
    with pytest.raises(UnknownParameterError, match=r"linear_fc1.*mlp\.gate.*mlp\.up"):
        describe([built], model, ParallelConfig())


def _names_of_stage(rank: int, model: ModelConfig, parallel: ParallelConfig) -> list:
    with join(parallel, timeout_seconds=30):
        initialize_megatron(parallel, 1)
        chunks = build(model, parallel, precision="fp32", recompute="none", seed=1)
        return [
            (name, logical.shared_copy)
            for logical in describe(chunks, model, parallel).values()
            for name in logical.names
        ]


def test_stages_hold_the_layers_of_the_whole_model_by_their_global_index():
    model = model_config(tie_head=True)
    stages = run(_names_of_stage, 2, model, ParallelConfig(pp=2, interleave=2))
    layers = [
        {int(n.split(".")[1]) for n, _ in stage if n.startswith("layers")} for stage in stages
    ]
    assert layers == [{0, 2}, {1, 3}]
    counted = [name for stage in stages for name, shared_copy in stage if not shared_copy]
    assert sorted(counted) == sorted(logical_shapes(model))
    assert [n for stage in stages for n, shared_copy in stage if shared_copy] == ["embedding"]
