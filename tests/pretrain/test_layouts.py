"""The same run on another layout has the same losses."""

import pytest

from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, losses, train

KINDS = {
    "adamw": ({"optimizer__name": "adamw", "optimizer__lr": 0.003}, 1e-5),
    "muon": ({"optimizer__arithmetic": "fp32"}, 1e-5),
    "bf16": ({"train__precision": "bf16"}, 1e-3),
}

LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "pp2 interleaved": {"pp": 2, "interleave": 2},
    "tp2 pp2 dp2 sp": {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
}

MORE_LAYOUTS = {
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
    "tp2 pp2 sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tp2 dp2 sp": {"tp": 2, "dp": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), parts=2)


@pytest.fixture(scope="module")
def one_process(blend, tmp_path_factory):
    """Losses of each kind in one process."""
    found = {}

    def get(kind: str, **more) -> list[float]:
        key = (kind, *more.items())
        if key not in found:
            folder = tmp_path_factory.mktemp("one")
            train(blend, folder, **KINDS[kind][0], **more)
            found[key] = losses(folder)
        return found[key]

    return get


def check(blend, folder, kind: str, layout: dict, expected: list[float], **more) -> None:
    options, tolerance = KINDS[kind]
    options = options | {f"parallel__{name}": value for name, value in layout.items()} | more
    train(blend, folder, **options)
    assert losses(folder) == pytest.approx(expected, rel=tolerance)
    assert expected[-1] < 0.9 * expected[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_losses_do_not_depend_on_the_layout(blend, one_process, tmp_path, kind, layout):
    check(blend, tmp_path, kind, LAYOUTS[layout], one_process(kind))


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_losses_do_not_depend_on_the_layout_either(blend, one_process, tmp_path, kind, layout):
    check(blend, tmp_path, kind, MORE_LAYOUTS[layout], one_process(kind))


@pytest.mark.parametrize("layout", ["tp2 sp", "pp2 interleaved"])
def test_losses_in_bf16_do_not_depend_on_the_layout(blend, one_process, tmp_path, layout):
    check(blend, tmp_path, "bf16", LAYOUTS[layout], one_process("bf16"))
    assert one_process("bf16") != pytest.approx(one_process("muon"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE_LAYOUTS])
def test_losses_in_bf16_do_not_depend_on_the_layout_either(blend, one_process, tmp_path, layout):
    check(blend, tmp_path, "bf16", (LAYOUTS | MORE_LAYOUTS)[layout], one_process("bf16"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_four_interleaved_stages_compute_the_same(blend, one_process, tmp_path, kind):
    eight = {"model__layers": 8}
    layout = {"pp": 4, "interleave": 2}
    check(blend, tmp_path, kind, layout, one_process(kind, **eight), **eight)


@pytest.mark.parametrize(
    "options",
    [
        {"train__overlap": True, "parallel__dp": 2},
        {"train__recompute": "full", "parallel__tp": 2},
        {"train__recompute": "selective"},
        {"train__micro_batch": 8},
        {"outer__interval": 1, "outer__lr": 1.0, "outer__momentum": 0.0},
    ],
    ids=str,
)
def test_options_that_must_not_change_the_losses(blend, one_process, tmp_path, options):
    check(blend, tmp_path, "muon", {}, one_process("muon"), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True}, {"pp": 2, "interleave": 2, "dp": 2}],
    ids=str,
)
def test_overlap_with_compute_does_not_change_the_losses(blend, one_process, tmp_path, layout):
    check(blend, tmp_path, "muon", layout, one_process("muon"), train__overlap=True)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_a_tied_head_trains_alike_on_every_layout(blend, one_process, tmp_path, layout):
    tied = {"model__tie_head": True}
    check(blend, tmp_path, "muon", layout, one_process("muon", **tied), **tied)


def test_document_masking_trains_alike_on_every_layout_and_matters(blend, one_process, tmp_path):
    masked = {"model__document_masking": True}
    expected = one_process("muon", **masked)
    check(blend, tmp_path, "muon", {"pp": 2, "tp": 2}, expected, **masked)
    assert expected != pytest.approx(one_process("muon"), rel=1e-4)


def test_held_out_loss_is_of_the_anchor_wherever_in_a_round_it_is_measured(blend, tmp_path):
    """Replicas share the held-out batches, and the layout inside them does not matter."""
    options = {"outer__interval": 4, "validation__every": 3, "optimizer__arithmetic": "fp32"}
    two = {"parallel__replicas": 2}
    train(blend, tmp_path / "a", **options, **two)
    train(blend, tmp_path / "b", **options, **two, parallel__tp=2)
    found = [[line["loss"] for line in lines(tmp_path / name, "validation")] for name in "ab"]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert [line["step"] for line in lines(tmp_path / "a", "validation")] == [0, 3, 6, 9, 10]
    # Steps 1 to 3 are not in the anchor yet.
    assert found[0][1] == found[0][0]
    assert found[0][-1] < found[0][0]
