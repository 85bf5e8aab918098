"""What a stage says of itself, on real ranks."""

import pytest

from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.muon.test_optimizer import LR, MODEL, make
from tests.ranks import run


def measure(rank, parallel) -> tuple[int, list[tuple[int, int]]]:
    """Bytes sent, and for each part the elements of its buffer and the ranks that share it."""
    with join(parallel, 30):
        model = MODEL.model_copy(update={"experts": 4})
        stage = make(rank, parallel, OptimizerConfig(lr=LR), model).stage
        (chunk,) = stage.chunks
        buffers = chunk.buffers + chunk.expert_parallel_buffers
        sizes = [
            (b.numel, part.dp_group.size()) for b, part in zip(buffers, stage.parts, strict=True)
        ]
        return stage.wire_bytes(), sizes


@pytest.mark.parametrize(
    ("layout", "shared_by"),
    [({"dp": 2}, [2]), ({"dp": 2, "ep": 2}, [2, 1]), ({"dp": 4, "ep": 2}, [4, 2])],
    ids=str,
)
def test_experts_are_reduced_only_between_ranks_that_hold_the_same(layout, shared_by):
    parallel = ParallelConfig(**layout)
    (sent, sizes), *_ = run(measure, parallel.world_size, parallel)
    assert [ranks for _, ranks in sizes] == shared_by
    # FP32 gradients go, FP32 weights come back.
    assert sent == sum(8 * numel * (ranks - 1) // ranks for numel, ranks in sizes)
