"""What a run leaves in its folder, which others script against."""

import pytest

from pretrain.config import load
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, train

METRICS = {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "mfu", "seconds"}
ROUNDS = {
    "round",
    "fragment",
    "step",
    "replicas",
    "pseudogradient_norm",
    "cosine",
    "drift",
    "bytes_sent",
    "bytes_planned",
    "seconds",
    "exposed_seconds",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    blend = write_corpus(root)
    options = {"outer__interval": 4, "validation__every": 5, "checkpoint__every": 3}
    train(blend, root / "run", parallel__replicas=2, train__log_every=2, **options)
    return root / "run"


def test_metrics_have_a_line_for_each_logged_step_with_tokens_over_all_replicas(folder):
    found = lines(folder, "metrics")
    assert [line["step"] for line in found] == [2, 4, 6, 8, 10]
    assert [line["tokens"] for line in found] == [512 * line["step"] for line in found]
    assert all(line.keys() >= METRICS for line in found)
    assert all(line["mfu"] is None for line in found)  # no peak is known of this device


def test_the_last_round_ends_with_the_run_however_short_it_is(folder):
    found = lines(folder, "rounds")
    assert [(line["round"], line["step"]) for line in found] == [(1, 4), (2, 8), (3, 10)]
    assert all(line.keys() >= ROUNDS for line in found)
    assert all(-1 <= line["cosine"] <= 1 for line in found)
    # A step trains on 512 tokens, half of them in each replica.
    assert [line["tokens"] for line in found] == [[1024, 1024], [1024, 1024], [512, 512]]


def test_validation_is_of_the_global_weights_at_the_start_in_between_and_at_the_end(folder):
    found = lines(folder, "validation")
    assert [(line["step"], line["weights"]) for line in found] == [
        (0, "global"),
        (5, "global"),
        (10, "global"),
    ]


def test_events_tell_start_checkpoints_and_end(folder):
    found = lines(folder, "events")
    assert [line["event"] for line in found] == ["start", *["checkpoint"] * 4, "end"]
    assert [line["step"] for line in found] == [0, 3, 6, 9, 10, 10]


def test_older_checkpoints_go_and_latest_names_the_newest(folder):
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["latest", "step-00000009", "step-00000010"]
    assert (folder / "checkpoints/latest").read_text().strip() == "step-00000010"


def test_the_written_configuration_is_a_recipe_that_gives_the_run_again(folder):
    text = (folder / "config.yaml").read_text()
    config = load(folder / "config.yaml").config
    assert config.run.dir == str(folder)
    assert config.outer.interval == 4
    assert "# command line" in text
    assert "# default" in text


def test_curves_are_there_for_tensorboard(folder):
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
