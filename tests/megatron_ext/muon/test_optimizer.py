"""The distributed optimizer against the float64 whole-matrix reference, on real layouts."""

import zlib
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from megatron.core import parallel_state

from megatron_ext import host
from megatron_ext.errors import TrainingError
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.gpt import build
from megatron_ext.model.initialize import draw
from megatron_ext.model.logical import (
    LogicalParameter,
    Segment,
    describe,
    kind_of,
    logical_shapes,
)
from megatron_ext.muon.config import AveragingConfig, OptimizerConfig, Rule
from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.muon.part import Part
from megatron_ext.muon.reference import Reference
from megatron_ext.muon.routing import route_all
from megatron_ext.muon.stage import Stage
from megatron_ext.muon.verify import least_cosine
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.ranks import run

MODEL = ModelConfig(
    layers=4, hidden=64, heads=4, kv_heads=2, ffn=96, vocab_size=48, sequence_length=32
)
SEED = 7
STEPS = 3
LR = 0.02
RULES = (
    Rule(match="*.attention.v", lr_factor=0.5),
    Rule(match="layers.1.*", optimizer="adamw", weight_decay=0.0),
    Rule(match="head", lr_factor=3.0, weight_decay=0.25),
)


def gradient_of(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Gaussian, with a scale of its own for each parameter; the same for every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator) * 10 ** (len(name) % 5 - 2)


def make(
    rank: int, parallel: ParallelConfig, config: OptimizerConfig, model=MODEL, precision="fp32"
):
    host.prepare()
    if not parallel_state.model_parallel_is_initialized():
        initialize_megatron(parallel, SEED)
    chunks = build(model, parallel, precision=precision, recompute="none", seed=SEED)
    logical = describe(chunks, model, parallel)
    whole = cache(lambda name: draw(name, model, SEED))
    stage = Stage(chunks, logical, route_all(model, config), chunks[0].config)
    return InnerOptimizer(stage, config, lambda block: whole(block.name)[block.slices])


def put_gradients(optimizer: InnerOptimizer, step: int) -> None:
    """What DDP's reduction would leave: complete gradients, of which this rank uses its shard."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for part, index, parameter in held(optimizer):
        for segment in parameter.segments_of(rank):
            whole = gradient_of(segment.name, segment.shape, step)
            part.gradient(index)[segment.local_slices] = whole[segment.slices]


def held(optimizer: InnerOptimizer) -> Iterator[tuple[Part, int, LogicalParameter]]:
    """Every parameter on this rank, as its number in a part of the stage."""
    for part in optimizer.stage.parts:
        for index, parameter in enumerate(part.plan.parameters):
            yield part, index, parameter


def train(rank, parallel, cases, precision="fp32"):
    """For each (configuration, model) steps on injected gradients.

    Norms, owned masters, and this rank's weights.
    """
    with join(parallel, 60):
        return [outcome(make(rank, parallel, *case, precision)) for case in cases]


def outcome(optimizer: InnerOptimizer):
    norms = take_steps(optimizer)
    masters = [(b, t.clone()) for kind, b, t in optimizer.tensors() if kind == "master"]
    return norms, masters, weights_of(optimizer)


def take_steps(optimizer: InnerOptimizer) -> list[float]:
    norms = []
    for step in range(STEPS):
        put_gradients(optimizer, step)
        norms.append(optimizer.step(LR))
    return norms


def weights_of(optimizer: InnerOptimizer) -> list[tuple[Segment, torch.Tensor]]:
    """What the model computes with on this rank."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    return [
        (segment, part.weight(index)[segment.local_slices].clone())
        for part, index, parameter in held(optimizer)
        for segment in parameter.segments_of(tp_rank)
    ]


@cache
def reference(config: OptimizerConfig, model: ModelConfig) -> tuple[Reference, list[float]]:
    shapes = logical_shapes(model)
    weights = {name: draw(name, model, SEED) for name in shapes}
    slow = Reference(weights, route_all(model, config), config)
    norms = [
        slow.step({n: gradient_of(n, s, step) for n, s in shapes.items()}, LR)
        for step in range(STEPS)
    ]
    return slow, norms


LAYOUTS = {
    "one": {},
    "tp2": {"tp": 2},
    "tp4, more ranks than key-value heads": {"tp": 4},
    "dp2": {"dp": 2},
    "dp3": {"dp": 3},
    "pp2": {"pp": 2},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
    "interleaved": {"pp": 2, "interleave": 2},
}


GATED_AND_TIED = MODEL.model_copy(update={"tie_head": True, "attention_gate": True})
CASES = [
    (OptimizerConfig(lr=LR, weight_decay=0.1, clip=0.0, arithmetic=arithmetic), model)
    for arithmetic in ("fp32", "bf16")
    for model in (MODEL, GATED_AND_TIED)
]
GRID = [
    {"tp": tp, "pp": pp, "dp": dp}
    for tp in (1, 2, 4)
    for pp in (1, 2)
    for dp in (1, 2, 3)
    if tp * pp * dp > 1
]


def check(parallel: dict, *cases: tuple[OptimizerConfig, ModelConfig]) -> list[dict]:
    """Compare with the reference; returns the whole masters of each case."""
    parallel = ParallelConfig(**parallel)
    ranks = run(train, parallel.world_size, parallel, cases, timeout=120)
    return [
        compare(results, *case)
        for results, case in zip(zip(*ranks, strict=True), cases, strict=True)
    ]


def compare(results, config: OptimizerConfig, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Compare what the ranks have with the reference; returns the whole masters."""
    slow, norms = reference(config, model)
    shapes = logical_shapes(model)
    owners = {name: torch.zeros(shape, dtype=torch.int) for name, shape in shapes.items()}
    wholes = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rank_norms, masters, _ in results:
        assert rank_norms == pytest.approx(norms, rel=1e-6)
        for block, master in masters:
            owners[block.name][block.slices] += 1
            wholes[block.name][block.slices] = master
    for name, count in owners.items():
        assert (count == 1).all(), f"{name} is not owned exactly once"
    for name, whole in wholes.items():
        start = draw(name, model, SEED).double()
        update, expected = whole - start, slow.weights[name] - start
        cosine = torch.cosine_similarity(update.flatten(), expected.flatten(), dim=0)
        assert cosine >= least_cosine(slow.routes[name].optimizer, config), name
        assert (update.norm() / expected.norm()).item() == pytest.approx(1, rel=2e-2), name
    for _, _, weights in results:
        for segment, weight in weights:
            assert torch.equal(weight, wholes[segment.name][segment.slices]), segment.name
    return wholes


@cache
def of_one_process() -> list[dict[str, torch.Tensor]]:
    return check({}, *CASES)


def check_agreement(layout: dict) -> None:
    """Matrices are those of one process bit for bit: each is orthogonalised whole."""
    for one, many in zip(of_one_process(), check(layout, *CASES), strict=True):
        for name in one:
            if kind_of(name) == "matrix":
                assert torch.equal(one[name], many[name]), name
            else:
                torch.testing.assert_close(one[name], many[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_update_is_that_of_whole_matrices_on_every_layout(layout):
    check_agreement(LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRID, ids=lambda layout: str(tuple(layout.values())))
def test_the_update_is_that_of_whole_matrices_on_the_whole_grid(layout):
    check_agreement(layout)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": True, "scale": "match_adamw"},
        {"coefficients": "polar_express", "newton_schulz_steps": 7, "scale": "spectral"},
        {"coefficients": "simple", "scale": "shape_scaling", "momentum": 0.95},
        {"coefficients": "cans", "newton_schulz_steps": 4},
        {"per_head": True},
        {"normuon": True},
        {"normuon": True, "per_head": True, "nesterov": True, "cautious_decay": True},
        {"cautious_decay": True},
        {"rules": RULES},
        {"momentum": 0.0, "clip": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_options_follow_the_reference(options, layout):
    config = OptimizerConfig(lr=LR, weight_decay=0.5, arithmetic="fp32", **options)
    check(LAYOUTS[layout], (config, MODEL))


@pytest.mark.parametrize("layout", ["one", "tp2 dp2", "tp4, more ranks than key-value heads"])
def test_adamw_alone_follows_the_reference(layout):
    config = OptimizerConfig(name="adamw", lr=LR, weight_decay=0.1)
    check(LAYOUTS[layout], (config, MODEL))


def train_averaged(rank, parallel, config):
    """After some steps: owned (z, x), and what the model is trained at and judged by."""
    with join(parallel, 30):
        optimizer = make(rank, parallel, config)
        take_steps(optimizer)
        kinds = {"master": {}, "average": {}}
        for kind, block, tensor in optimizer.tensors():
            if kind in kinds:
                kinds[kind][block] = tensor.clone()
        trained = weights_of(optimizer)
        with optimizer.global_weights():
            judged = weights_of(optimizer)
        return kinds["master"], kinds["average"], trained, judged, weights_of(optimizer)


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("layout", ["one", "tp2 dp2", "pp2"])
def test_primal_averaging_follows_its_definition(layout, name):
    averaging = AveragingConfig(decay=0.6, mix=0.7)
    config = OptimizerConfig(name=name, lr=LR, arithmetic="fp32", averaging=averaging)
    parallel = ParallelConfig(**LAYOUTS[layout])
    shapes = logical_shapes(MODEL)
    slow = Reference({n: draw(n, MODEL, SEED) for n in shapes}, route_all(MODEL, config), config)
    z = slow.weights
    x = {name: weight.clone() for name, weight in z.items()}
    for step in range(STEPS):
        slow.step({n: gradient_of(n, s, step) for n, s in shapes.items()}, LR)
        x = {n: 0.6 * x[n] + 0.4 * z[n] for n in x}
    y = {n: 0.7 * x[n] + 0.3 * z[n] for n in x}
    close = {"rtol": 1e-4, "atol": 2e-5}
    for masters, averages, trained, judged, after in run(
        train_averaged, parallel.world_size, parallel, config
    ):
        for block in masters:
            torch.testing.assert_close(
                averages[block].double(), x[block.name][block.slices], **close
            )
        for expected, weights in ((y, trained), (x, judged), (y, after)):
            for segment, weight in weights:
                right = expected[segment.name][segment.slices]
                torch.testing.assert_close(weight.double(), right, **close)
        for (_, before), (_, then) in zip(trained, after, strict=True):
            assert torch.equal(before, then)


def test_bf16_weights_are_the_rounded_masters():
    parallel, config = ParallelConfig(tp=2, dp=2), OptimizerConfig(lr=LR)
    ranks = run(train, 4, parallel, [(config, MODEL)], "bf16")
    results = [result for (result,) in ranks]
    wholes = {name: torch.zeros(shape) for name, shape in logical_shapes(MODEL).items()}
    for _, masters, _ in results:
        for block, master in masters:
            wholes[block.name][block.slices] = master
    for _, _, weights in results:
        for segment, weight in weights:
            assert torch.equal(weight, wholes[segment.name][segment.slices].bfloat16())


def spoil(rank):
    with join(ParallelConfig(tp=2), 30):
        optimizer = make(rank, ParallelConfig(tp=2), OptimizerConfig(lr=LR))
        put_gradients(optimizer, 0)
        for part, index, parameter in held(optimizer):
            if rank == 1 and "layers.2.mlp.up" in parameter.names:
                part.gradient(index)[-1, 0] = float("nan")
        before = optimizer.masters.clone()
        with pytest.raises(TrainingError) as caught:
            optimizer.step(LR)
        return str(caught.value), torch.equal(before, optimizer.masters)


def test_a_nan_gradient_is_named_and_the_step_not_taken():
    for message, unchanged in run(spoil, 2):
        assert "step 1: the gradient of layers.2.mlp.up is not finite" in message
        assert unchanged


def count_collectives(rank, parallel, changes):
    """Calls of torch's collectives in one step, but those of DDP, which come one a bucket."""
    with join(parallel, 30):
        model = MODEL.model_copy(update=changes)
        optimizer = make(rank, parallel, OptimizerConfig(lr=LR), model)
        put_gradients(optimizer, 0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step(LR)
        names = [event.name for event in profile.events() if event.name.startswith("c10d::")]
        return [name for name in names if "allgather" not in name]


@pytest.mark.parametrize(
    ("parallel", "experts", "most"),
    [
        (ParallelConfig(tp=2), 0, 12),
        (ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True), 4, 20),
    ],
    ids=["dense", "experts shared out"],
)
def test_the_number_of_collectives_does_not_grow_with_the_layers(parallel, experts, most):
    few, many = (
        run(count_collectives, parallel.world_size, parallel, {"layers": n, "experts": experts})[0]
        for n in (4, 8)
    )
    assert len(few) == len(many) <= most
    assert {"c10d::alltoall_base_", "c10d::allreduce_"} == set(many)
