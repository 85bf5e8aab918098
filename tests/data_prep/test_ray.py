"""The same units on a real Ray cluster of two nodes, one of which is killed."""

import threading
import time

import pytest

from tests.data_prep.helpers import REPOSITORY, SENTENCEPIECE, command, json_lines, tree, write

ray = pytest.importorskip("ray", reason="Ray is optional: pip install ray")
pytestmark = pytest.mark.slow

from ray.cluster_utils import Cluster  # noqa: E402


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("RAY_health_check_initial_delay_ms", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "200")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def source(tmp_path):
    for number in range(8):
        texts = [f"file {number} line {line} of many words " * 100 for line in range(200)]
        write(tmp_path / "in" / f"{number}.jsonl.zstd", json_lines(texts))
    return tmp_path / "in"


def tokenize(source, out, *options):
    fixed = ("--tokenizer", SENTENCEPIECE, "--output", out, "--unit-bytes", "200K")
    return ("tokenize", source, *fixed, *options)


def test_a_cluster_that_loses_a_node_gives_the_bytes_of_one_machine(
    capsys, tmp_path, source, cluster
):
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    clean, out = tmp_path / "clean", tmp_path / "out"
    assert command(capsys, *tokenize(source, clean, "--workers", 1)).code == 0
    killed_after = []

    def kill_second():
        while not (done := len(list(out.glob(".work/units/*/*/receipt.json")))):
            time.sleep(0.005)
        cluster.remove_node(second, allow_graceful=False)
        killed_after.append(done)

    killer = threading.Thread(target=kill_second)
    killer.start()
    ended = command(capsys, *tokenize(source, out, "--workers", 4, "--executor", "ray"))
    killer.join()
    assert ended.code == 0, ended.err
    units = sum(1 for _ in (out / "provenance.jsonl").open())
    assert killed_after[0] < units
    assert tree(out) == tree(clean)


def test_an_error_on_the_cluster_ends_in_the_same_line(capsys, tmp_path, source, cluster):
    write(source / "9.jsonl", b"broken\n")
    out = tmp_path / "out"
    ended = command(capsys, *tokenize(source, out, "--workers", 2, "--executor", "ray"))
    assert ended.code == 3
    assert "9.jsonl: line 1, offset 0: invalid-json" in ended.err
