"""The verification passes what is right, fails what is wrong, and leaves no trace."""

import pytest
import torch

from megatron_ext.muon.config import OptimizerConfig, Rule
from megatron_ext.muon.verify import VerificationError, judge, verify
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.muon.test_optimizer import LR, MODEL, make, put_gradients, weights_of
from tests.ranks import run

LAYOUTS = [{}, {"tp": 4}, {"tp": 2, "pp": 2, "dp": 2}, {"dp": 3}, {"pp": 2, "interleave": 2}]


def verified(rank, parallel, config, model=MODEL):
    with join(parallel, 30):
        optimizer = make(rank, parallel, config, model)
        checks = verify(optimizer)
        return checks, judge(checks, config)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_block_is_checked_and_follows_on_every_layout(layout):
    parallel = ParallelConfig(**layout)
    config = OptimizerConfig(lr=LR, weight_decay=0.1)
    results = run(verified, parallel.world_size, parallel, config)
    checks, verdict = results[0]
    assert all(result == results[0] for result in results)
    matrices = [check for check in checks if check.optimizer == "muon"]
    assert len(matrices) == 4 * 7
    assert all(check.orthogonality_error < 0.2 for check in matrices)
    assert max(check.relative_error for check in checks) < 0.05
    assert f"{len(checks)} blocks follow" in verdict


def test_experts_that_ranks_share_out_are_checked_once_each():
    model = MODEL.model_copy(update={"experts": 4})
    parallel = ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True)
    config = OptimizerConfig(lr=LR, weight_decay=0.1)
    checks, _ = run(verified, 4, parallel, config, model)[0]
    experts = [check for check in checks if ".experts." in check.name]
    assert len({check.name for check in experts}) == len(experts) == 4 * 4 * 3
    assert {check.rank for check in experts if ".experts.3." in check.name} == {2, 3}
    assert all(check.orthogonality_error < 0.2 for check in experts)


def test_options_are_verified_with_their_own_reference():
    config = OptimizerConfig(
        lr=LR,
        weight_decay=0.1,
        cautious_decay=True,
        normuon=True,
        per_head=True,
        nesterov=True,
        arithmetic="fp32",
        rules=(Rule(match="*.mlp.up", lr_factor=0.0), Rule(match="*.o", optimizer="adamw")),
    )
    checks, _ = run(verified, 2, ParallelConfig(tp=2), config)[0]
    assert min(check.cosine for check in checks) > 0.99999


def wrong(rank, damage):
    with join(ParallelConfig(tp=2), 30):
        config = OptimizerConfig(lr=LR)
        optimizer = make(rank, ParallelConfig(tp=2), config)
        damage(optimizer)
        judge(verify(optimizer), config)


def orthogonalise_by_rows(optimizer) -> None:
    """As an optimizer would that knows only its own shard."""
    for batch in optimizer._batches:
        batch._groups = [
            (shape, type(route)(**{**vars(route), "heads": 2})) for shape, route in batch._groups
        ]


def test_shards_orthogonalised_alone_are_found():
    with pytest.raises(VerificationError, match=r"28 of \d+ blocks is not that"):
        run(wrong, 2, orthogonalise_by_rows)


def left_as_it_was(rank):
    parallel, config = ParallelConfig(tp=2, dp=2), OptimizerConfig(lr=LR, normuon=True)
    with join(parallel, 30):
        optimizer = make(rank, parallel, config)
        results = []
        for check in (False, True):
            for step in range(2):
                put_gradients(optimizer, step)
                optimizer.step(LR)
            if check:
                before = [tensor.clone() for _, _, tensor in optimizer.tensors()]
                weights = weights_of(optimizer)
                verify(optimizer)
                after = [tensor for _, _, tensor in optimizer.tensors()]
                results += [torch.equal(*pair) for pair in zip(before, after, strict=True)]
                results += [
                    torch.equal(then, now)
                    for (_, then), (_, now) in zip(weights, weights_of(optimizer), strict=True)
                ]
                assert optimizer.steps == 4
        return all(results)


def test_state_and_weights_are_left_as_they_were():
    assert all(run(left_as_it_was, 4))
