"""What is exported computes in `transformers` what the run's model computes."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext import host
from megatron_ext.blocks import Block
from megatron_ext.checkpoint import Checkpoints, huggingface
from megatron_ext.checkpoint.saved import Saved
from megatron_ext.checkpoint.state import StateTensor
from megatron_ext.errors import ConfigError
from megatron_ext.model import ModelConfig, build, describe
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.ranks import run

TOKENS = torch.arange(48).reshape(2, 24) * 7 % 64


def _model(**changes: Any) -> ModelConfig:
    small = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 64}
    return ModelConfig(**(small | {"sequence_length": 24} | changes))


def _whole(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of a logical parameter; norms near one, but not one."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    return 1 + 0.2 * values if name.endswith("norm") else 0.3 * values


def _build(model: ModelConfig, parallel: ParallelConfig) -> tuple[torch.nn.Module, list[Block]]:
    """A rank's part of the model with those values, and the blocks that it owns."""
    host.prepare()
    initialize_megatron(parallel, seed=1)
    [chunk] = build(model, parallel, precision="fp32", recompute="none", seed=1)
    rank = parallel_state.get_tensor_model_parallel_rank()
    owned = []
    for parameter, logical in describe([chunk], model, parallel).items():
        for segment in logical.segments_of(rank):
            values = _whole(segment.name, segment.shape)[segment.slices]
            parameter.data[segment.local_slices] = values
            if not (logical.shared_copy or (logical.replicated and rank)):
                owned.append(segment)
    return chunk, owned


class _Masters:
    def __init__(self, blocks: list[Block]):
        self._blocks = blocks

    def tensors(self) -> list[StateTensor]:
        return [("master", b, _whole(b.name, b.shape)[b.slices]) for b in self._blocks]

    def counters(self) -> dict[str, Any]:
        return {"step": 1}

    def rng(self) -> Tensor:
        return torch.get_rng_state()


def _save(rank: int, folder: Path, model: ModelConfig, parallel: ParallelConfig):
    with join(parallel, timeout_seconds=60) as replicas:
        _, owned = _build(model, parallel)
        Checkpoints(folder, replicas).save(_Masters(owned), 1)


def _own_logits(rank: int, model: ModelConfig) -> Tensor:
    with join(ParallelConfig(), timeout_seconds=60), torch.no_grad():
        chunk, _ = _build(model, ParallelConfig())
        positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
        return chunk(TOKENS, positions, None)


def _their_logits(rank: int, folder: Path) -> tuple[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return type(model).__name__, model(TOKENS).logits


@pytest.mark.parametrize(
    ("sandwich", "tied", "architecture"),
    [
        (True, False, "Gemma3ForCausalLM"),
        (True, True, "Gemma3ForCausalLM"),
        (False, False, "Qwen3ForCausalLM"),
        (False, True, "Qwen3ForCausalLM"),
    ],
)
def test_logits_in_transformers_are_the_models(tmp_path, monkeypatch, sandwich, tied, architecture):
    model = _model(sandwich_norm=sandwich, tie_head=tied)
    parallel = ParallelConfig(tp=2) if tied else ParallelConfig(tp=2, pp=2)
    run(_save, parallel.world_size, tmp_path, model, parallel)
    # Several shards, as a model of more than 5 GB has.
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 30_000)
    huggingface.write(Saved(tmp_path / "step-00000001"), model, tmp_path, torch.float32)
    [own] = run(_own_logits, 1, model)
    [(name, theirs)] = run(_their_logits, 1, tmp_path)
    assert name == architecture
    difference = (own - theirs).abs().max().item()
    print(f"{architecture}, tied head {tied}: largest difference of logits {difference:.1e}")
    assert difference <= 1e-4
    assert own.abs().max() > 1


def test_a_configuration_of_another_model_is_refused_by_the_first_name_that_differs(tmp_path):
    run(_save, 1, tmp_path, _model(), ParallelConfig())
    saved = Saved(tmp_path / "step-00000001")
    with pytest.raises(ConfigError, match=r"layers.0.mlp.down is \(32, 48\).* would be \(32, 64\)"):
        huggingface.write(saved, _model(ffn=64), tmp_path, torch.float32)


def test_a_gated_model_is_refused_because_no_model_of_theirs_has_the_gate(tmp_path):
    run(_save, 1, tmp_path, _model(attention_gate=True), ParallelConfig())
    saved = Saved(tmp_path / "step-00000001")
    with pytest.raises(ConfigError, match=r"model\.attention_gate=true"):
        huggingface.write(saved, _model(attention_gate=True), tmp_path, torch.float32)


def test_a_model_of_experts_is_refused_because_export_knows_dense_ones(tmp_path):
    model = _model(experts=2)
    run(_save, 1, tmp_path, model, ParallelConfig())
    saved = Saved(tmp_path / "step-00000001")
    with pytest.raises(ConfigError, match=r"model\.experts=2: export knows"):
        huggingface.write(saved, model, tmp_path, torch.float32)


def test_an_export_never_replaces_or_leaves_half_of_a_folder(tmp_path):
    (tmp_path / "there").mkdir()
    with (
        pytest.raises(ConfigError, match="exists already"),
        huggingface.new_folder(tmp_path / "there"),
    ):
        raise AssertionError("not reached")
    with (
        pytest.raises(ValueError, match="in the middle"),
        huggingface.new_folder(tmp_path / "new") as folder,
    ):
        (folder / "config.json").touch()
        raise ValueError("in the middle")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
