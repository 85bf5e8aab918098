"""Initial weights depend on the seed and the parameter's name alone, and follow the paper's law."""

from functools import cache

import pytest
import torch

from megatron_ext import host
from megatron_ext.model import ModelConfig, build, describe, logical_shapes
from megatron_ext.model.initialize import draw
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.megatron_ext.model.step import model_config
from tests.ranks import run

LAYOUTS = [
    ParallelConfig(tp=2),
    ParallelConfig(tp=4, sequence_parallel=True),
    ParallelConfig(pp=4),
    ParallelConfig(tp=2, pp=2, interleave=2),
]


def _weights(rank: int, model: ModelConfig, parallel: ParallelConfig, seed: int) -> list:
    host.prepare()
    with join(parallel, timeout_seconds=30) as replicas:
        initialize_megatron(parallel, seed)
        chunks = build(model, parallel, precision="fp32", recompute="none", seed=seed)
        return [
            (segment, parameter.detach()[segment.local_slices].clone())
            for parameter, logical in describe(chunks, model, parallel).items()
            for segment in logical.segments_of(replicas.rank % parallel.tp)
        ]


@cache
def whole_weights(model: ModelConfig, parallel: ParallelConfig, seed: int = 3) -> dict:
    """Every logical parameter, put together from the parameters of all ranks."""
    wholes: dict[str, torch.Tensor] = {}
    for segments in run(_weights, parallel.world_size, model, parallel, seed):
        for segment, value in segments:
            whole = wholes.setdefault(segment.name, torch.full(segment.shape, torch.nan))
            held = whole[segment.slices]
            assert held.isnan().all() or torch.equal(held, value), f"copies of {segment} differ"
            whole[segment.slices] = value
    return wholes


@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_bitwise_those_of_one_process_in_every_layout(layout, tie_head):
    model = model_config(kv_heads=2, tie_head=tie_head)
    alone = whole_weights(model, ParallelConfig())
    wholes = whole_weights(model, layout)
    assert wholes.keys() == alone.keys() == logical_shapes(model).keys()
    for name, weight in alone.items():
        assert torch.equal(wholes[name], weight), name
        assert torch.equal(draw(name, model, 3), weight), name


def test_another_seed_and_another_name_give_other_weights():
    model = model_config()
    q = draw("layers.0.attention.q", model, 1)
    assert not torch.equal(q, draw("layers.0.attention.q", model, 2))
    assert not torch.equal(q, draw("layers.1.attention.q", model, 1))


def test_deviations_are_depth_scaled():
    model = model_config(hidden=256, ffn=704, vocab_size=4096)
    expected = {"embedding": 1.0, "head": 256**-0.5 * 0.9865}  # 0.9865: cut at three deviations
    for part in ("attention.q", "attention.k", "attention.v", "mlp.gate"):
        expected[f"layers.3.{part}"] = 0.02
    for part in ("attention.o", "mlp.up", "mlp.down"):
        expected[f"layers.3.{part}"] = 0.02 / 8**0.5
    for name, std in expected.items():
        weight = draw(name, model, 1)
        assert weight.std().item() == pytest.approx(std, rel=0.01), name
        assert abs(weight.mean().item()) < 0.02 * std, name
    head = draw("head", model, 1)
    assert head.abs().max() <= 3 * 256**-0.5
    assert (draw("layers.3.attention.q_norm", model, 1) == 1).all()


def test_a_tied_matrix_is_drawn_as_a_head():
    tied = draw("embedding", model_config(hidden=256, vocab_size=4096, tie_head=True), 1)
    assert tied.std().item() == pytest.approx(256**-0.5 * 0.9865, rel=0.01)
