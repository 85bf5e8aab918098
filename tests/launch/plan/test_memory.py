"""The planned memory against the live tensors of real sessions."""

import gc
from statistics import mean

import pytest
import torch

from launch.plan.memory import activation_bytes, plan_memory
from launch.plan.stages import stage_ranks
from megatron_ext import host
from megatron_ext.model.gpt import build
from megatron_ext.model.logical import logical_shapes
from megatron_ext.replicas import initialize_megatron, join
from pretrain import exit
from pretrain.config import load
from pretrain.session import open_session
from pretrain.settings import RunConfig
from tests.pretrain.corpus import VOCABULARY, write_corpus
from tests.ranks import run

SMALL = {
    "model.hidden": 256,
    "model.layers": 4,
    "model.heads": 4,
    "model.ffn": 512,
    "model.vocab_size": VOCABULARY,
    "model.sequence_length": 32,
    "train.global_batch": 4,
    "train.micro_batch": 1,
}


@pytest.fixture(scope="module", autouse=True)
def _megatron_without_cuda():
    host.prepare()


EVERYTHING_OUTER = {
    "outer.optimizer": "adamw",
    "outer.lr": 0.01,
    "outer.momentum": 0.9,
    "outer.delay": 1,
    "outer.error_feedback": "true",
    "outer.second_error_feedback": "true",
}


def config_of(options: dict) -> list[str]:
    return [f"{key}={value}" for key, value in (SMALL | options).items()]


def live_bytes() -> int:
    """Bytes of all tensors of the process, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(rank: int, overrides: list[str]) -> dict:
    exit.quieten_imports()
    gc.collect()
    before = live_bytes()
    resolved = load("demo", overrides)
    with open_session(resolved) as session:
        _, tokens = session.engine.train(session.samples.micro_batches(1))
        session.inner.step(0.01)
        if session.outer:
            session.outer.step(1, tokens, last=True)
        inner = session.inner
        chunks = inner.stage.chunks
        buffers = [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
        kinds: dict[str, int] = {}
        tensors = [*inner.tensors(), *(session.outer.tensors() if session.outer else ())]
        for kind, _, tensor in tensors:
            kinds[kind] = kinds.get(kind, 0) + tensor.nbytes
        gc.collect()
        return {
            "weights": sum(buffer.param_data.nbytes for buffer in buffers),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "masters": kinds.pop("master"),
            "anchor": kinds.pop("anchor", 0),
            "outer_momentum": kinds.pop("outer_momentum", 0) + kinds.pop("outer_square", 0),
            "error_feedback": kinds.pop("error_feedback", 0) + kinds.pop("second_error", 0),
            "in_flight": kinds.pop("outer_pending", 0),
            "optimizer": sum(kinds.values()),
            "live": live_bytes() - before,
            "plans": [part.plan for part in inner.stage.parts],
        }


@pytest.mark.parametrize(
    "layout",
    [
        {"outer.interval": 1},
        {"outer.interval": 1, "parallel.replicas": 2},
        {"outer.interval": 2, "parallel.replicas": 2} | EVERYTHING_OUTER,
        {"outer.interval": 0, "parallel.tp": 2, "train.precision": "bf16"},
        {"outer.interval": 1, "parallel.dp": 2, "optimizer.name": "adamw"},
        {"outer.interval": 1, "parallel.pp": 2, "model.tie_head": "true"},
        {"outer.interval": 0, "parallel.pp": 2, "parallel.interleave": 2},
        {"outer.interval": 0, "parallel.tp": 2, "parallel.sequence_parallel": "true"}
        | {"model.experts": 3, "parallel.dp": 2},
        {"outer.interval": 1, "model.experts": 4, "parallel.dp": 4, "parallel.ep": 2},
    ],
    ids=lambda layout: " ".join(f"{k.split('.')[1]}={v}" for k, v in layout.items()),
)
def test_planned_memory_is_that_of_the_live_tensors(layout, tmp_path):
    blend = write_corpus(tmp_path)
    overrides = config_of({"data.blend": blend, "run.dir": tmp_path / "run"} | layout)
    config = load("demo", overrides).config
    ranks = run(measure, config.parallel.world_size, overrides)

    stages = stage_ranks(config)
    planned_ranks = [rank for ranks in stages for rank in ranks] * config.parallel.replicas
    for planned, measured in zip(planned_ranks, ranks, strict=True):
        assert [seat.plan for seat in planned.seats] == measured["plans"]
    of_stage = len(stages[0])
    for planned in plan_memory(config, on_gpu=False):
        measured = ranks[planned.stage * of_stage :][:of_stage]
        for name in measured[0].keys() - {"live", "plans"}:
            expected = getattr(planned.memory, name)
            assert max(rank[name] for rank in measured) == pytest.approx(expected, rel=0.05), name
        assert max(rank["live"] for rank in measured) == pytest.approx(
            planned.memory.state, rel=0.05
        )


def keep(rank: int, overrides: list[str]) -> int:
    """Bytes that autograd keeps of one forward pass, each storage once."""
    config = load("demo", overrides).config
    with join(config.parallel, 60):
        initialize_megatron(config.parallel, 1)
        model, train = config.model, config.train
        (chunk,) = build(
            model, config.parallel, precision=train.precision, recompute=train.recompute, seed=1
        )
        tokens = torch.randint(0, VOCABULARY, (train.micro_batch, model.sequence_length))
        positions = torch.arange(model.sequence_length).expand(train.micro_batch, -1)
        weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def remember(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            chunk(tokens, positions, None, labels=tokens)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train.precision": "bf16", "model.kv_heads": 2},
        {"train.precision": "bf16", "model.attention_gate": "true"},
        {"train.precision": "bf16", "train.recompute": "selective"},
        {"train.precision": "bf16", "parallel.tp": 2},
        {"train.precision": "bf16", "parallel.tp": 2, "parallel.sequence_parallel": "true"},
        {"model.experts": 8},
        {"train.precision": "bf16", "model.experts": 16, "train.recompute": "selective"},
        {"train.precision": "bf16", "model.experts": 8, "model.experts_per_token": 3}
        | {"parallel.tp": 2, "parallel.sequence_parallel": "true"},
        {"train.precision": "bf16", "model.experts": 16, "parallel.dp": 2, "parallel.ep": 2},
        {"train.precision": "bf16", "model.experts": 16, "parallel.dp": 4, "parallel.ep": 4},
        {"model.experts": 16, "parallel.dp": 2, "parallel.ep": 2}
        | {"parallel.tp": 2, "parallel.sequence_parallel": "true"},
    ],
    ids=lambda options: " ".join(f"{k.split('.')[1]}={v}" for k, v in options.items()) or "fp32",
)
def test_planned_activations_are_what_autograd_keeps(options):
    """Per layer: the difference between a deep and a shallow model."""
    deep, shallow = (
        config_of(options | {"model.layers": layers, "model.sequence_length": 64})
        for layers in (4, 2)
    )
    processes = load("demo", deep).config.parallel.world_size
    # Tokens choose unevenly which rank's experts compute them.
    kept, less = (mean(run(keep, processes, values)) for values in (deep, shallow))
    planned = [
        activation_bytes(load("demo", values).config, 0, on_gpu=False) for values in (deep, shallow)
    ]
    assert planned[0] - planned[1] == pytest.approx(kept - less, rel=0.05)


def test_15b_on_its_recipe_needs_what_arithmetic_says():
    """Rough bytes a parameter: 2 + 4 replicated over dp, 12 to 16 owned once in a replica."""
    config = load("15b").config
    stages = plan_memory(config, on_gpu=True)
    assert len(stages) == config.parallel.pp == 2
    parameters = 15_229_089_792
    whole = sum(4 * stage.memory.state for stage in stages)  # tensor ranks are nearly alike
    assert whole == pytest.approx(parameters * (2 + 4 + 4 + 4 + 4 + 4), rel=0.1)
    assert all(stage.memory.peak > stage.memory.state for stage in stages)


def fp8_config(**options: object) -> RunConfig:
    """The 15B recipe in FP8 on one stage, whose layers the numbers below are about."""
    values = {"parallel.tp": 1, "parallel.pp": 1, "parallel.sequence_parallel": "false"}
    values |= {"train.recompute": "none", "fp8.first_last_layers_bf16": 0}
    values |= {key.replace("__", "."): value for key, value in options.items()}
    return load("15b+fp8", [f"{key}={value}" for key, value in values.items()]).config


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_fp8_keeps_the_inputs_of_matrices_in_one_byte_and_the_context_twice(recompute):
    plain, fp8 = (
        fp8_config(fp8__format=name, train__recompute=recompute) for name in ("none", "hybrid")
    )
    model = plain.model
    # Of QKV's, FC1's and FC2's inputs a byte less; of the projection's, which BF16 shares with
    # attention, a byte more.
    layer = 2 * model.hidden + model.ffn - model.hidden
    less = model.layers * layer
    if recompute == "selective":  # and the whole of the one that is computed again
        less = model.layers * model.hidden + layer
    one, other = (activation_bytes(config, stage=0, on_gpu=True) for config in (plain, fp8))
    assert one - other == plain.train.micro_batch * model.sequence_length * less


def test_fp8_keeps_two_copies_of_the_matrices_that_it_computes():
    matrices = 2 * (fp8_config().model.layers - 2) / fp8_config().model.layers
    (plain,) = plan_memory(fp8_config(fp8__format="none"), on_gpu=True)
    (fp8,) = plan_memory(fp8_config(fp8__first_last_layers_bf16=1), on_gpu=True)
    shapes = logical_shapes(fp8_config().model)
    numel = sum(
        rows * rest[0] for name, (rows, *rest) in shapes.items() if "layers." in name and rest
    )
    assert fp8.memory.weights - plain.memory.weights == numel * matrices
    assert fp8.memory.masters == plain.memory.masters


def test_emulated_fp8_keeps_what_bf16_does():
    emulated = fp8_config(fp8__backend="emulate", model__implementation="plain")
    plain = fp8_config(fp8__format="none", model__implementation="plain")
    (one,), (other,) = (plan_memory(config, on_gpu=True) for config in (emulated, plain))
    assert one.memory == other.memory


def test_no_outer_loop_has_no_outer_state():
    overrides = config_of({"outer.interval": 0})
    (stage,) = plan_memory(load("demo", overrides).config, on_gpu=False)
    assert stage.memory.anchor == stage.memory.outer_momentum == 0
