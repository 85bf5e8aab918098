import json
import random

import pytest

from data_prep.outputs import read_manifest
from tests.data_prep.helpers import SENTENCEPIECE, command, documents, json_lines, tree, write
from tests.data_prep.kills import killed_at


@pytest.fixture
def texts():
    """Texts by file, where a third are copies within or across files."""
    chance = random.Random(0)
    return {
        f"p={number % 2}/{number}.gz": [f"text {chance.randrange(60)}" for _ in range(30)]
        for number in range(4)
    }


@pytest.fixture
def source(tmp_path, texts):
    for name, found in texts.items():
        write(tmp_path / "in" / name, json_lines(found[:15]) + b"broken\n" + json_lines(found[15:]))
    return tmp_path / "in"


def dedup(source, out, *options, workers=1):
    return ["dedup", source, "--output", out, "--unit-bytes", "500", "--workers", workers, *options]


def tokenize(source, out, *options):
    fixed = ["--output", out, "--tokenizer", SENTENCEPIECE, "--workers", 1]
    bad = ["--bad-records", "skip", "--max-bad", "50%"]
    return ["tokenize", source, *fixed, *bad, *options]


def test_of_equal_texts_the_lowest_path_and_line_survives(capsys, tmp_path, source, texts):
    ended = command(capsys, *dedup(source, tmp_path / "skip"), "--json")
    assert ended.code == 0, ended.err
    unique = list(dict.fromkeys(text for name in sorted(texts) for text in texts[name]))
    assert json.loads(ended.out)["duplicates"] == 120 - len(unique)
    ended = command(capsys, *tokenize(source, tmp_path / "out", "--skip", tmp_path / "skip"))
    assert ended.code == 0, ended.err
    write(tmp_path / "unique.jsonl", json_lines(unique))
    command(capsys, *tokenize(tmp_path / "unique.jsonl", tmp_path / "expected"))
    assert sorted(documents(tmp_path / "out")) == sorted(documents(tmp_path / "expected"))
    rows = read_manifest(tmp_path / "out")["inputs"]
    assert sum(row["skipped"]["duplicate"] for row in rows) == 120 - len(unique)
    assert command(capsys, "verify", tmp_path / "out").code == 0
    first = json.loads(command(capsys, "locate", tmp_path / "out", "p=0:20", "--json").out)
    assert texts[first["input"]][first["line"] - 1 - (first["line"] > 16)] == first["text"]


def test_the_list_depends_on_neither_workers_nor_restarts(capsys, tmp_path, source):
    assert command(capsys, *dedup(source, tmp_path / "one")).code == 0
    assert command(capsys, *dedup(source, tmp_path / "two", workers=2)).code == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    kills = 0
    while killed_at(30, tmp_path / "killed", dedup(source, tmp_path / "killed")):
        kills += 1
    assert kills >= 2
    assert tree(tmp_path / "killed") == tree(tmp_path / "one")


def test_a_list_of_other_inputs_is_refused(capsys, tmp_path, source):
    assert command(capsys, *dedup(source, tmp_path / "skip")).code == 0
    write(source / "p=0" / "5.gz", json_lines(["new"]))
    skip = ("--skip", tmp_path / "skip")
    ended = command(capsys, *tokenize(source, tmp_path / "out", *skip))
    assert (ended.code, "was made without p=0/5.gz" in ended.err) == (2, True)
    (source / "p=0" / "5.gz").unlink()
    write(source / "p=0" / "0.gz", json_lines(["changed"]))
    ended = command(capsys, *tokenize(source, tmp_path / "out", *skip))
    assert (ended.code, "is not the file that dedup read" in ended.err) == (3, True)
    ended = command(capsys, *tokenize(source, tmp_path / "out", "--skip", tmp_path))
    assert (ended.code, "holds no skip.json" in ended.err) == (2, True)
