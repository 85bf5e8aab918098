"""Runs whose layers compute in emulated FP8: layouts, resuming, and changing to and from BF16."""

import pytest
import torch

from megatron_ext.checkpoint.saved import Saved
from megatron_ext.errors import ConfigError
from pretrain.config import load
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, lines, losses, train

STEPS = 6
BF16 = {"train__precision": "bf16", "train__steps": STEPS, "optimizer__arithmetic": "fp32"}
FP8 = BF16 | {"fp8__format": "hybrid", "fp8__backend": "emulate"}
RECIPES = ["tensorwise", "blockwise", "delayed", "mxfp8"]


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def masters(results: list[dict]) -> dict:
    return {block: tensor for one in results for block, tensor in one["masters"]}


@pytest.mark.parametrize(
    "recipe",
    [
        "delayed",  # the one with a state of its own
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tensorwise", "blockwise", "mxfp8")
        ),
    ],
)
def test_stopped_and_resumed_run_is_the_straight_one(blend, tmp_path, recipe):
    options = FP8 | {"fp8__recipe": recipe, "parallel__tp": 2, "fp8__amax_history": 2}
    options["model__ffn"] = 128  # mxfp8 wants multiples of 32 on each rank
    straight = train(blend, tmp_path / "straight", **options)
    train(blend, tmp_path / "stopped", train__stop_at=4, **options)
    stopped = train(blend, tmp_path / "stopped", **options)
    for (block, one), other in zip(
        masters(straight).items(), masters(stopped).values(), strict=True
    ):
        assert torch.equal(one, other), block
    assert losses(tmp_path / "straight") == losses(tmp_path / "stopped")


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("tensorwise", {"tp": 2, "sequence_parallel": True}),
        ("delayed", {"tp": 2}),
        pytest.param("tensorwise", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("tensorwise", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("delayed", {"tp": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param("delayed", {"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_round_alike(blend, tmp_path, recipe, layout):
    options = FP8 | {"fp8__recipe": recipe}
    train(blend, tmp_path / "one", **options)
    train(blend, tmp_path / "many", **options, **{f"parallel__{k}": v for k, v in layout.items()})
    train(blend, tmp_path / "bf16", **BF16)
    one, many, bf16 = (losses(tmp_path / name) for name in ("one", "many", "bf16"))
    # Sums in another order round to other numbers of BF16, and those to others of FP8.
    assert many[0] == pytest.approx(one[0], rel=1e-3)
    assert many == pytest.approx(one, rel=2e-2)
    assert one != bf16


def scaling(run) -> dict[str, torch.Tensor]:
    """Delayed scaling's tensors in a run's newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    saved = Saved(newest)
    keys = [key for key in saved.entries("replica-0") if key.startswith("fp8_scaling.")]
    return dict(saved.read("replica-0", keys))


def test_delayed_scaling_goes_on_with_another_tensor_parallelism(blend, tmp_path):
    options = FP8 | {"fp8__recipe": "delayed", "fp8__amax_history": 8}
    train(blend, tmp_path / "straight", parallel__tp=2, **options)
    train(blend, tmp_path / "changed", parallel__tp=2, train__stop_at=4, **options)
    before = scaling(tmp_path / "changed")
    train(blend, tmp_path / "changed", parallel__dp=2, **options)
    after, straight = scaling(tmp_path / "changed"), scaling(tmp_path / "straight")
    assert len(before) == 2 * 4 * SMALL["model.layers"]
    for key, history in after.items():
        if key.endswith("history"):
            # Two steps later the four before stand two places further.
            assert torch.equal(history[:, 2:6], before[key][:, :4])
            assert (history[:, :6] > 0).all()
        torch.testing.assert_close(history, straight[key], rtol=0.2, atol=1e-6)
    assert losses(tmp_path / "changed") == pytest.approx(losses(tmp_path / "straight"), rel=2e-2)


@pytest.mark.parametrize(("before", "after"), [(BF16, FP8), (FP8, BF16)], ids=["to", "from"])
def test_run_may_change_between_bf16_and_fp8_and_says_so(blend, tmp_path, before, after):
    delayed = {"fp8__recipe": "delayed"}
    train(blend, tmp_path, train__stop_at=3, **before, **delayed)
    with pytest.raises(ConfigError, match=r"fp8\.format is .*resume\.allow=\[fp8\.format\]"):
        train(blend, tmp_path, **after, **delayed)
    train(blend, tmp_path, **after, **delayed, resume__allow="[fp8.format]")
    (resume,) = [line for line in lines(tmp_path, "events") if line["event"] == "resume"]
    assert resume["changed"]["fp8.format"] == (
        ["none", "hybrid"] if after is FP8 else ["hybrid", "none"]
    )
    assert len(losses(tmp_path)) == STEPS
    assert bool(scaling(tmp_path)) == (after is FP8)


def test_layers_at_both_ends_stay_in_bf16(blend, tmp_path):
    """With all four layers at the ends nothing is rounded."""
    train(blend, tmp_path / "ends", fp8__first_last_layers_bf16=2, **FP8)
    train(blend, tmp_path / "one", fp8__first_last_layers_bf16=1, **FP8)
    train(blend, tmp_path / "bf16", **BF16)
    assert losses(tmp_path / "ends") == losses(tmp_path / "bf16")
    assert losses(tmp_path / "one") != losses(tmp_path / "bf16")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.precision=fp32"], "fp8.format=hybrid needs train.precision=bf16"),
        (["fp8.backend=transformer_engine"], "needs model.implementation=transformer_engine"),
        (["fp8.recipe=delayed", "fp8.first_last_layers_bf16=1"], "delayed scaling spans all"),
        (["fp8.first_last_layers_bf16=3"], "are more than model.layers=4"),
        (["fp8.recipe=mxfp8", "parallel.tp=2"], "model.ffn / parallel.tp, 176, must be a multiple"),
        (["model.sequence_length=100", "train.micro_batch=1"], "the 100 tokens of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_fp8_cannot_compute_is_refused(overrides, message):
    base = ["train.precision=bf16", "fp8.format=hybrid", "fp8.backend=emulate"]
    with pytest.raises(ConfigError) as caught:
        load("demo", [*base, *overrides])
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_held_out_loss_is_within_a_percent_of_bf16s(tmp_path, recipe):
    corpus = write_corpus(tmp_path, documents=2000, held_out=80)
    options = {"train__steps": 120, "train__global_batch": 32, "validation__every": 120}
    options |= {"validation__batches": 2}
    for name, precision in (("bf16", BF16), ("fp8", FP8 | {"fp8__recipe": recipe})):
        train(corpus, tmp_path / name, timeout=600, **(precision | options))
    bf16, fp8 = (lines(tmp_path / name, "validation")[-1]["loss"] for name in ("bf16", "fp8"))
    assert fp8 == pytest.approx(bf16, rel=0.01)
