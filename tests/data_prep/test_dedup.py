import json
import random
import subprocess
import sys
from pydoc_data import topics

import pytest
import zstandard

from data_prep import dedup as deduplication
from data_prep import near
from data_prep.near import band_keys
from data_prep.outputs import read_manifest
from data_prep.skiplist import SkipList
from tests.data_prep.helpers import (
    SENTENCEPIECE,
    command,
    documents,
    json_lines,
    process,
    small_disk,
    tree,
    write,
)
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


def shingles(text):
    return {text[start : start + 24] for start in range(max(len(text) - 24, 0) + 1)}


def jaccard(one, other):
    return len(shingles(one) & shingles(other)) / len(shingles(one) | shingles(other))


def mutated(text, edits, chance):
    """The text with characters changed far enough apart to break 24 pieces each."""
    changed = list(text)
    for place in chance.sample(range(0, len(text), 40), edits):
        changed[place] = "#"
    return "".join(changed)


def test_bands_are_shared_as_often_as_the_similarity_of_the_texts_says():
    chance = random.Random(1)
    texts = [text[:4000] for text in topics.topics.values() if len(text) > 4000][:25]
    for edits, expected in [(2, 1.0), (4, 0.997), (60, 0.0)]:
        agreed = 0.0
        for text in texts:
            other = mutated(text, edits, chance)
            likely = 1 - (1 - jaccard(text, other) ** 13) ** 20
            assert likely == pytest.approx(expected, abs=0.1)
            agreed += any(a == b for a, b in zip(band_keys(text), band_keys(other), strict=True))
        assert agreed / len(texts) == pytest.approx(expected, abs=0.1)


def test_equal_signatures_come_from_any_process_and_any_batching(monkeypatch):
    text = "".join(topics.topics.values())[:10_000]
    expected = list(band_keys(text))
    monkeypatch.setattr(near, "_BATCH_PIECES", 100)
    assert list(band_keys(text)) == expected
    code = "import sys; from data_prep.near import band_keys; print(*band_keys(sys.stdin.read()))"
    other = subprocess.run(
        [sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True
    )
    assert [*map(int, other.stdout.split())] == expected


@pytest.fixture
def nearly(tmp_path):
    """Documentation, half of it again with a few letters changed, spread over files."""
    chance = random.Random(2)
    texts = [text[:3000] for text in topics.topics.values() if len(text) > 3000][:24]
    found = [*texts, *(mutated(text, 2, chance) for text in texts[:12]), *texts[:3]]
    for number in range(4):
        write(tmp_path / "near" / f"{number}.jsonl.zstd", json_lines(found[number::4]))
    return tmp_path / "near"


def test_of_near_copies_the_lowest_path_and_line_survives(capsys, tmp_path, nearly):
    ended = command(capsys, *dedup(nearly, tmp_path / "skip", "--near"), "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["duplicates"] == 15
    command(capsys, *dedup(nearly, tmp_path / "exact"))
    assert json.loads((tmp_path / "exact" / "skip.json").read_text())["inputs"] != []
    ended = command(capsys, *tokenize(nearly, tmp_path / "out", "--skip", tmp_path / "skip"))
    assert ended.code == 0, ended.err
    rows = read_manifest(tmp_path / "out")["inputs"]
    assert sum(row["skipped"].get("duplicate", 0) for row in rows) == 15
    assert command(capsys, "verify", tmp_path / "out").code == 0
    texts = {}  # of every survivor no text that is near comes earlier
    for name in sorted(path.name for path in nearly.iterdir()):
        content = zstandard.decompress((nearly / name).read_bytes())
        texts |= {
            (name, n): json.loads(line)["text"] for n, line in enumerate(content.split(b"\n")[:-1])
        }
    skip = SkipList(tmp_path / "skip")
    for row in json.loads((tmp_path / "skip" / "skip.json").read_text())["inputs"]:
        for number in skip.of(row["path"], row["sha256"]).tolist():
            place = (row["path"], number)
            assert any(other < place and jaccard(text, texts[place]) > 0.8
                       for other, text in texts.items())  # fmt: skip


def test_the_list_of_near_copies_depends_on_neither_workers_nor_units(capsys, tmp_path, nearly):
    lists = []
    for number, options in enumerate([("--unit-bytes", 900), ("--unit-bytes", "1M")]):
        out = tmp_path / f"list-{number}"
        assert (
            command(capsys, *dedup(nearly, out, "--near", *options, workers=1 + number)).code == 0
        )
        lists.append({name: content for name, content in tree(out).items() if ".npy" in name})
    assert lists[0] == lists[1] and lists[0]


def test_records_fall_into_buckets_that_fit_memory(capsys, tmp_path, source, monkeypatch):
    assert command(capsys, *dedup(source, tmp_path / "one")).code == 0
    monkeypatch.setattr(deduplication, "_BUCKET_BYTES", 500)
    assert command(capsys, *dedup(source, tmp_path / "many")).code == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def test_a_disk_that_fills_up_while_copies_are_marked_kills_the_process(tmp_path):
    """By SIGBUS, as it does any that writes to a mapped file without room for it."""
    write(tmp_path / "in" / "a.zst", json_lines(["same"] * 200_000))
    with small_disk(tmp_path / "disk", "4788k"):  # the hashes fit, the marks do not
        out = tmp_path / "disk" / "skip"
        running = process(*dedup(tmp_path / "in", out, "--unit-bytes", "100M"))
        _, err = running.communicate(timeout=120)
        assert list(out.glob(".work/units/*/*/receipt.json"))
    assert running.returncode == 1, (running.returncode, err)
    assert "the disk is full" in err and err.count("\n") == 1
