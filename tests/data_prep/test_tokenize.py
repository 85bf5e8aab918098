"""Whole runs of `tokenize`: what goes in comes out, and what cannot is never passed over."""

import hashlib
import importlib.util
import itertools
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from sentencepiece import SentencePieceProcessor

from data_prep import estimate
from data_prep.cli import main
from data_prep.indexed import IndexedFile
from data_prep.outputs import read_manifest
from data_prep.selection import sampling_hash
from tests.data_prep.helpers import (
    SENTENCEPIECE,
    TEKKEN,
    command,
    documents,
    json_lines,
    tree,
    write,
)
from tests.data_prep.kills import killed_at

MODEL = SentencePieceProcessor(model_file=str(SENTENCEPIECE))
TEXTS = [f"Document {number}, with a line\nand  more." for number in range(101)]


def ids_of(texts):
    return [[*MODEL.encode(text), 2] for text in texts]


def run(capsys, given, out, *options, tokenizer=SENTENCEPIECE, workers=1):
    return command(
        capsys, "tokenize", given, "--tokenizer", tokenizer, "--output", out, "--workers", workers,
        *options,
    )  # fmt: skip


@pytest.fixture
def partitions(tmp_path):
    """Three partitions of two files each with clashing names, one compressed otherwise."""
    for number, key in enumerate(["quality=high", "quality=low", "quality=medium"]):
        for part in (0, 1):
            texts = [f"{key} {part} {line}" for line in range(10)]
            suffix = (".jsonl.zstd", ".jsonl.gz", ".jsonl")[number]
            write(tmp_path / "in" / key / f"part-{part}{suffix}", json_lines(texts), [50])
    return tmp_path / "in"


def test_each_partition_gets_an_output_in_path_then_line_order(capsys, tmp_path, partitions):
    ended = run(capsys, partitions, tmp_path / "out", workers=2)
    assert ended.code == 0, ended.err
    for key in ("quality=high", "quality=low", "quality=medium"):
        data = IndexedFile(tmp_path / "out" / key)
        expected = ids_of(f"{key} {part} {line}" for part in (0, 1) for line in range(10))
        assert [data[number].tolist() for number in range(len(data))] == expected
    assert not (tmp_path / "out" / ".work").exists()


def test_megatron_core_reads_the_output(capsys, tmp_path, partitions):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    run(capsys, partitions, tmp_path / "out")
    data = IndexedDataset(str(tmp_path / "out" / "quality=low"))
    assert data[3].tolist() == ids_of(["quality=low 0 3"])[0]


def test_inputs_are_read_in_place_from_a_read_only_folder(capsys, tmp_path, partitions):
    before = sorted(partitions.rglob("*"))
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert run(capsys, partitions, tmp_path / "out").code == 0
    assert sorted(partitions.rglob("*")) == before


def test_parquet_and_jsonl_give_the_same_documents(capsys, tmp_path):
    (tmp_path / "in").mkdir()
    table = pa.table({"id": range(101), "content": TEXTS})
    pq.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=40)
    options = ("--text-column", "content", "--unit-bytes", "500")
    ended = run(capsys, tmp_path / "in", tmp_path / "out", *options)
    assert ended.code == 0, ended.err
    assert documents(tmp_path / "out") == ids_of(TEXTS)


def test_parquet_of_another_column_or_type_is_refused(capsys, tmp_path):
    pq.write_table(pa.table({"id": [1], "text": [2]}), tmp_path / "a.parquet")
    ended = run(capsys, tmp_path / "a.parquet", tmp_path / "out", "--text-column", "txt")
    assert (ended.code, "has no column 'txt' but id, text" in ended.err) == (2, True)
    ended = run(capsys, tmp_path / "a.parquet", tmp_path / "out2")
    assert (ended.code, "column 'text' is int64, not string" in ended.err) == (2, True)


def test_bad_parquet_strings_are_bad_records(capsys, tmp_path):
    raw = pa.array([b"good", b"\xff", None, b""], pa.binary())
    pq.write_table(pa.table({"text": raw.view(pa.string())}), tmp_path / "a.parquet")
    ended = run(
        capsys, tmp_path / "a.parquet", tmp_path / "out", "--bad-records", "skip", "--max-bad", ".6"
    )
    assert ended.code == 0, ended.err
    assert read_manifest(tmp_path / "out")["inputs"][0]["skipped"] == {
        "empty-text": 1,
        "invalid-utf8": 1,
        "null-text": 1,
    }


BAD = {
    "invalid-json": b'{"text": "a"',
    "invalid-json (two objects)": b'{"text": "a"}{"text": "b"}',
    "invalid-json (deep)": b'{"text":' + b"[" * 100_000,
    "invalid-utf8": b'{"text": "\xff"}',
    "lone-surrogate": rb'{"text": "\ud800"}',
    "null-text": b'{"text": null}',
    "missing-text": b'{"txt": "a"}',
    "text-not-a-string": b'{"text": 7}',
    "not-an-object": b'["text"]',
    "over-long": b'{"text": "%s"}' % (b"a" * 300_000),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_record_stops_the_run_with_file_line_and_offset(capsys, tmp_path, kind, workers):
    before = json_lines(TEXTS[:50])
    path = write(tmp_path / "a.jsonl", before + BAD[kind] + b"\n" + json_lines(TEXTS[50:]))
    options = ("--max-record-bytes", "200000")
    ended = run(capsys, path, tmp_path / "out", *options, workers=workers)
    assert ended.code == 3
    assert f"a.jsonl: line 51, offset {len(before)}: {kind.split()[0]}" in ended.err
    assert ended.err.count("\n") == 1
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_records_are_skipped_only_when_asked_and_always_listed(capsys, tmp_path, workers):
    lines = json_lines(TEXTS).splitlines(keepends=True)
    for number, bad in enumerate(BAD.values()):
        lines.insert(number * 10, bad + b"\n")
    path = write(tmp_path / "a.jsonl", b"".join(lines))
    options = ("--max-record-bytes", "200000", "--bad-records", "skip", "--max-bad", "10%")
    ended = run(capsys, path, tmp_path / "out", *options, workers=workers)
    assert ended.code == 0, ended.err
    assert documents(tmp_path / "out") == ids_of(TEXTS)
    rejects = [json.loads(row) for row in (tmp_path / "out" / "rejects.jsonl").open()]
    assert [(r["line"], r["reason"]) for r in rejects] == [
        (10 * number + 1, kind.split()[0]) for number, kind in enumerate(BAD)
    ]
    row = read_manifest(tmp_path / "out")["inputs"][0]
    assert row["records"] == 111 and row["documents"] == 101
    assert sum(row["skipped"].values()) == 10 and row["skipped"]["invalid-json"] == 3


def test_the_bound_on_bad_records_stops_the_run(capsys, tmp_path):
    bad = b'{"text": null}\n'
    for name in "abc":
        write(tmp_path / "in" / name, json_lines(TEXTS) + bad * 2)
    options = ("--bad-records", "skip", "--max-bad", "1%")
    ended = run(capsys, tmp_path / "in", tmp_path / "out", *options)
    assert (ended.code, "4 bad records exceed --max-bad 1.0000% (3 records)" in ended.err) == (
        3,
        True,
    )
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_stopped_run_goes_on_with_skip_and_gives_what_a_clean_run_gives(capsys, tmp_path):
    write(tmp_path / "in" / "a", json_lines(TEXTS))
    write(tmp_path / "in" / "b", b"broken\n" + json_lines(TEXTS[:5]))
    assert run(capsys, tmp_path / "in", tmp_path / "out").code == 3
    options = ("--bad-records", "skip", "--max-bad", "10%")
    assert run(capsys, tmp_path / "in", tmp_path / "out", *options).code == 0
    assert documents(tmp_path / "out") == ids_of(TEXTS + TEXTS[:5])


def test_empty_texts_and_blank_lines_are_skipped_and_counted(capsys, tmp_path):
    empty = json_lines([""])
    content = (
        empty + b"\n \t\r\n" + json_lines(["one", " "]) + b"\r\n" + json_lines(["two"]) + empty
    )
    write(tmp_path / "a", content)
    assert run(capsys, tmp_path / "a", tmp_path / "out").code == 0
    assert documents(tmp_path / "out") == ids_of(["one", " ", "two"])
    row = read_manifest(tmp_path / "out")["inputs"][0]
    assert row["skipped"] == {"blank-line": 3, "empty-text": 2}
    assert row["records"] == 8


@pytest.mark.parametrize("content", [b"", b"\n\n", json_lines(["", ""])])
def test_no_documents_is_an_error(capsys, tmp_path, content):
    write(tmp_path / "a.jsonl", content)
    ended = run(capsys, tmp_path / "a.jsonl", tmp_path / "out")
    assert (ended.code, "gave no documents" in ended.err) == (3, True)
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize("suffix", [".jsonl.zstd", ".jsonl.gz"])
def test_a_half_uploaded_file_fails_and_nothing_is_published(capsys, tmp_path, suffix):
    write(tmp_path / "in" / f"good{suffix}", json_lines(TEXTS))
    cut = write(tmp_path / "in" / f"half{suffix}", json_lines(TEXTS * 50))
    cut.write_bytes(cut.read_bytes()[:-40])
    ended = run(capsys, tmp_path / "in", tmp_path / "out", workers=2)
    assert ended.code == 3
    assert f"half{suffix}" in ended.err and "truncated" in ended.err
    assert {path.name for path in tmp_path.glob("out/*")} <= {".work"}
    write(tmp_path / "in" / f"half{suffix}", json_lines(TEXTS * 50))
    assert run(capsys, tmp_path / "in", tmp_path / "out", workers=2).code == 0


def test_the_manifest_accounts_for_everything(capsys, tmp_path, partitions):
    run(capsys, partitions, tmp_path / "out", "--validation", "20%")
    manifest = read_manifest(tmp_path / "out")
    for row in manifest["inputs"]:
        content = (partitions / row["path"]).read_bytes()
        assert row["bytes"] == len(content)
        assert row["sha256"] == hashlib.sha256(content).hexdigest()
        assert row["records"] == 10
    for row in manifest["outputs"]:
        for entry in (row, row["index"]):
            content = (tmp_path / "out" / entry["path"]).read_bytes()
            assert entry["bytes"] == len(content)
            assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    for key in ("documents", "tokens"):
        ins, outs = (sum(row[key] for row in manifest[side]) for side in ("inputs", "outputs"))
        assert ins == outs
    assert manifest["tokenizer"]["eod_piece"] == "</s>"
    assert manifest["options"]["validation"] == "1/5"


def test_blend_weights_are_by_tokens_and_sum_to_one(capsys, tmp_path, partitions):
    run(capsys, partitions, tmp_path / "out", "--validation", "20%")
    blend = yaml.safe_load((tmp_path / "out" / "blend.yaml").read_text())
    assert blend["tokenizer"]["vocab_size"] == 32_000 and blend["tokenizer"]["eod"] == 2
    assert (
        tmp_path / "out" / blend["tokenizer"]["path"]
    ).read_bytes() == SENTENCEPIECE.read_bytes()
    for split in ("train", "validation"):
        tokens = sum(row["tokens"] for row in blend[split])
        assert sum(row["weight"] for row in blend[split]) == pytest.approx(1, abs=1e-12)
        for row in blend[split]:
            assert row["weight"] == pytest.approx(row["tokens"] / tokens)
            assert len(IndexedFile(tmp_path / "out" / row["prefix"])) == row["documents"]


def test_held_out_documents_do_not_depend_on_how_they_are_cut_into_files(capsys, tmp_path):
    write(tmp_path / "one" / "a", json_lines(TEXTS))
    for number, text in enumerate(TEXTS):
        write(tmp_path / "many" / f"{number:03d}.gz", json_lines([text]))
    held_out = []
    for name in ("one", "many"):
        assert (
            run(capsys, tmp_path / name, tmp_path / f"out-{name}", "--validation", "0.1").code == 0
        )
        held_out.append(documents(tmp_path / f"out-{name}", "validation"))
    assert held_out[0] == held_out[1] and 2 <= len(held_out[0]) <= 25
    both = held_out[0] + documents(tmp_path / "out-one", "train")
    assert sorted(both) == sorted(ids_of(TEXTS))


def test_ids_above_65535_are_kept(capsys, tmp_path):
    write(tmp_path / "a", json_lines(["Широкая электрификация", "日本語の文章"]))
    assert run(capsys, tmp_path / "a", tmp_path / "out", tokenizer=TEKKEN).code == 0
    assert max(map(max, documents(tmp_path / "out"))) > 65_535


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--validation", "2"), "--validation '2': must be at least 0 and below 1"),
        (("--validation", "x%"), "--validation 'x%': is no share"),
        (("--where", "quality=high"), "no input has the key 'quality'"),
        (("--eod", "<|endoftext|>"), "has no such piece"),
        (("--text-column", "body"), "missing-text"),
    ],
)
def test_wrong_options_end_in_one_line(capsys, tmp_path, options, message):
    path = write(tmp_path / "a", json_lines(TEXTS))
    ended = run(capsys, path, tmp_path / "out", *options)
    assert ended.code in (2, 3)
    assert message in ended.err and ended.err.count("\n") == 1
    assert "Traceback" not in ended.err


def test_at_most_so_many_tokens_are_an_unbiased_subset(capsys, tmp_path):
    texts = [f"{number} " * (1 + number % 40) for number in range(600)]
    for part in range(3):
        write(tmp_path / "in" / f"{part}.gz", json_lines(texts[part::3]))
    assert run(capsys, tmp_path / "in", tmp_path / "all").code == 0
    whole = sum(map(len, documents(tmp_path / "all")))
    limit = whole // 4
    options = ("--max-tokens", limit, "--validation", "10%", "--unit-bytes", "3K")
    assert run(capsys, tmp_path / "in", tmp_path / "some", *options).code == 0
    chosen = documents(tmp_path / "some")
    assert limit - 130 < sum(map(len, chosen)) <= limit
    # The lowest hashes, whatever the length: what is left out has only higher ones.
    taken = {tuple(ids) for ids in chosen}
    hashes = {True: [], False: []}
    for text in texts:
        hashes[(*MODEL.encode(text), 2) in taken].append(sampling_hash(text))
    assert max(hashes[True]) < min(hashes[False])
    row_sums = [row["documents"] + sum(row["skipped"].values()) == row["records"]
                for row in read_manifest(tmp_path / "some")["inputs"]]  # fmt: skip
    assert all(row_sums)
    assert run(capsys, tmp_path / "in", tmp_path / "two", *options, workers=2).code == 0
    assert tree(tmp_path / "some") == tree(tmp_path / "two")


def test_an_estimate_that_promised_too_much_leaves_the_subset_short(capsys, tmp_path, monkeypatch):
    """It is taken again, with more, and depends on no estimate: nor does it after any kill."""
    texts = ["long " * 3000] * 2 + [f"short {number}" for number in range(400)]
    write(tmp_path / "a", json_lines(texts))
    limit = 400
    options = ("--max-tokens", limit, "--bad-records", "skip", "--max-bad", "10%")
    given = ("tokenize", tmp_path / "a", "--tokenizer", SENTENCEPIECE, "--workers", 1, *options)
    monkeypatch.setattr(estimate, "_READ_CHARACTERS", 1000)
    assert command(capsys, *given, "--output", tmp_path / "clean").code == 0
    chosen = documents(tmp_path / "clean")
    by_hash = sorted(set(texts), key=sampling_hash)
    whole = ids_of(by_hash)
    fitting = next(n for n in range(len(whole)) if sum(map(len, whole[: n + 1])) > limit)
    assert sorted(chosen) == sorted(whole[:fitting])
    out = tmp_path / "killed"
    for point in itertools.count(1, 3):
        shutil.rmtree(out, ignore_errors=True)
        if not killed_at(point, out, [*given, "--output", out]):
            break
        assert command(capsys, *given, "--output", out).code == 0
        assert tree(out) == tree(tmp_path / "clean"), point
    assert point > 30


def test_a_partition_of_too_many_documents_is_cut_into_numbered_outputs(capsys, tmp_path):
    write(tmp_path / "a.gz", json_lines(TEXTS))
    options = ("--documents-per-output", 30, "--unit-bytes", "1K")
    assert run(capsys, tmp_path / "a.gz", tmp_path / "out", *options).code == 0
    prefixes = [row["prefix"] for row in read_manifest(tmp_path / "out")["outputs"]]
    assert prefixes == [f"all-{number:05d}" for number in range(len(prefixes))]
    assert all(len(IndexedFile(tmp_path / "out" / prefix)) <= 30 for prefix in prefixes)
    assert documents(tmp_path / "out") == ids_of(TEXTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "0"), "argument --workers: '0' is no whole number from 1 up"),
        (("--shard", "3/3"), "argument --shard: '3/3' is no shard; write 0/8 to 7/8"),
        (("--max-tokens", "many"), "argument --max-tokens: 'many' is no count"),
        (("--wrokers", "2"), "unrecognized arguments: --wrokers 2"),
    ],
)
def test_a_wrong_argument_ends_in_one_line(capsys, tmp_path, options, message):
    with pytest.raises(SystemExit) as ended:
        main(["tokenize", "in", "--tokenizer", "t", "--output", "o", *options])
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert printed.startswith("error: ") and message in printed and printed.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_an_executor_that_is_not_installed_is_refused_by_name(capsys, tmp_path):
    path = write(tmp_path / "a", json_lines(TEXTS))
    ended = run(capsys, path, tmp_path / "out", "--executor", "ray")
    assert (ended.code, "--executor ray: needs the package ray" in ended.err) == (2, True)
