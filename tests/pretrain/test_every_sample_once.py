"""Whatever changes on the way, the samples seen by the end are the planned ones, each once."""

from collections import Counter

import pytest

from megatron_ext.errors import ConfigError
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, losses, train

STEPS, STOP, BATCH = 4, 2, 12
SIZES = {"train__steps": STEPS, "train__global_batch": BATCH, "train__micro_batch": 1}


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), parts=2)


def seen(*sessions: list[dict]) -> Counter:
    return Counter(sample for ranks in sessions for rank in ranks for sample in rank["samples"])


@pytest.fixture(scope="module")
def planned(blend, tmp_path_factory) -> list[bytes]:
    """The samples of six steps in order, by the run of one process."""
    options = SIZES | {"train__steps": 6}
    (rank,) = train(blend, tmp_path_factory.mktemp("straight"), **options)
    assert len(rank["samples"]) == 6 * BATCH
    return rank["samples"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (4, 2)])
def test_replicas_come_and_go_inside_a_round(blend, tmp_path, planned, before, after):
    options = SIZES | {"outer__interval": 3}
    first = train(blend, tmp_path, parallel__replicas=before, train__stop_at=STOP, **options)
    second = train(blend, tmp_path, parallel__replicas=after, **options)
    assert seen(first, second) == Counter(planned[: STEPS * BATCH])


def test_a_run_of_another_batch_size_goes_on_where_the_old_one_stopped(blend, tmp_path, planned):
    first = train(blend, tmp_path, train__stop_at=STOP, **SIZES)
    larger = SIZES | {"train__global_batch": 2 * BATCH, "parallel__dp": 2}
    with pytest.raises(ConfigError, match=r"global_batch is 24 .*resume.allow=\[train.global_ba"):
        train(blend, tmp_path, **larger)
    second = train(blend, tmp_path, resume__allow="[train.global_batch]", **larger)
    assert seen(first, second) == Counter(planned)
    tokens = [line["tokens"] for line in lines(tmp_path, "metrics")]
    assert tokens == [32 * BATCH * batches for batches in (1, 2, 4, 6)]


def test_a_window_around_a_loss_spike_is_left_out_and_nothing_else(blend, tmp_path, planned):
    """The spike was in step 4; the run goes back to the checkpoint of step 2."""
    spiky = train(blend, tmp_path / "spiky", checkpoint__every=STOP, train__stop_at=STOP, **SIZES)
    train(blend, tmp_path / "spiky", **SIZES)
    spike = lines(tmp_path / "spiky", "metrics")[3]["sample"]
    assert spike == 3 * BATCH
    options = SIZES | {"data__skip": f"[[{spike - 4},{spike + BATCH}]]"}
    resume = tmp_path / "spiky/checkpoints/step-00000002"
    second = train(blend, tmp_path / "new", resume=resume, train__stop_at=3, **options)
    third = train(blend, tmp_path / "new", **options)  # the window is behind it by now
    left_out = planned[: spike - 4] + planned[spike + BATCH : 5 * BATCH + 4]
    assert seen(spiky, second, third) == Counter(left_out)
    assert losses(tmp_path / "new")[0] != losses(tmp_path / "spiky")[3]
    (first, _) = [line for line in lines(tmp_path / "new", "events") if line["event"] == "resume"]
    assert first["changed"]["data.skip"] == [[], [[spike - 4, spike + BATCH]]]
    # What was trained on already cannot be left out any more.
    with pytest.raises(ConfigError, match=r"data\.skip: \[3, 9\] begins before sample"):
        train(blend, tmp_path / "spiky", **SIZES | {"train__steps": 6, "data__skip": "[[3,9]]"})
