"""What users reported of other tools, each as a test named after its symptom.

The numbers are those of the project's own notes on public reports; those that are not here stand
in test_streams, test_tokenizers, test_restart and test_outputs under their symptoms.
"""

import json
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from data_prep.indexed import IndexedFile
from data_prep.outputs import read_manifest
from tests.data_prep.helpers import (
    REPOSITORY,
    SENTENCEPIECE,
    command,
    documents,
    json_lines,
    tree,
    write,
)
from tests.data_prep.tiny_models import lossy_model, model_without_bos

MODEL = SentencePieceProcessor(model_file=str(SENTENCEPIECE))


def ids_of(texts):
    return [[*MODEL.encode(text), 2] for text in texts]


def tokenize(capsys, given, out, *options, tokenizer=SENTENCEPIECE, workers=1):
    fixed = ("--tokenizer", tokenizer, "--output", out, "--workers", workers)
    return command(capsys, "tokenize", given, *fixed, *options)


@pytest.mark.parametrize("shards", [1, 2, 7, 101, 128])
def test_1_one_file_over_many_shards_writes_every_document_once(capsys, tmp_path, shards):
    texts = [f"document {number}" for number in range(101)]
    path = write(tmp_path / "in" / "a.jsonl.zstd", json_lines(texts))
    outs = [tmp_path / f"out-{index}" for index in range(shards)]
    for index, out in enumerate(outs):
        options = ("--shard", f"{index}/{shards}", "--unit-bytes", "256")
        assert tokenize(capsys, path, out, *options).code == 0
    found = [ids for out in outs for ids in documents(out)]
    assert found == ids_of(texts)


@pytest.mark.parametrize("name", ["a.jsonl.zstd", "a.zst", "a", "a.gz"])
def test_2_only_the_first_frame_is_read(capsys, tmp_path, name):
    texts = [f"document {number}" for number in range(500)]
    content = json_lines(texts)
    frames = write(tmp_path / "frames.gz" if name == "a.gz" else tmp_path / "frames.zst", content,
                   [len(content) * part // 50 for part in range(1, 50)])  # fmt: skip
    frames.rename(tmp_path / name)
    assert tokenize(capsys, tmp_path / name, tmp_path / "out").code == 0
    assert documents(tmp_path / "out") == ids_of(texts)


def test_3_one_bad_byte_loses_the_rest_of_the_file(capsys, tmp_path):
    lines = json_lines([f"document {number}" for number in range(1000)]).splitlines(True)
    lines[499] = lines[499].replace(b"document", b"doc\xffment")
    path = write(tmp_path / "a.jsonl", b"".join(lines))
    ended = tokenize(capsys, path, tmp_path / "out")
    assert ended.code == 3
    offset = len(b"".join(lines[:499]))
    assert f"a.jsonl: line 500, offset {offset}: invalid-utf8" in ended.err
    ended = tokenize(capsys, path, tmp_path / "out", "--bad-records", "skip", "--max-bad", "0.1%")
    assert ended.code == 0 and len(documents(tmp_path / "out")) == 999


def test_5_another_back_end_silently_drops_bos(capsys, tmp_path):
    path = write(tmp_path / "a.jsonl", json_lines(["one", "two"]))
    out = tmp_path / "out"
    assert tokenize(capsys, path, out, "--bos", "auto").code == 0
    assert read_manifest(out)["tokenizer"]["bos"] == 1
    before = tree(out)
    ended = tokenize(capsys, path, out)
    assert (ended.code, "tokenizer.bos: was 1, now absent" in ended.err) == (2, True)
    assert tree(out) == before


def test_6_the_eod_of_another_vocabulary_is_taken(capsys, tmp_path):
    path = write(tmp_path / "a.jsonl", json_lines(["one"]))
    ended = tokenize(capsys, path, tmp_path / "out", "--eod", "<|endoftext|>")
    assert (ended.code, "has no such piece" in ended.err) == (2, True)
    assert not (tmp_path / "out").exists()
    ended = tokenize(capsys, path, tmp_path / "out")
    assert "EOD 2 '</s>'" in ended.out


def test_8_added_tokens_do_not_count_towards_the_dtype(capsys, tmp_path):
    """65,490 entries and 60 added ones need int32: uint16 holds ids below 65,500 only."""
    vocab = {
        chr(0x4E00 + number % 20_000) + str(number // 20_000): number for number in range(65_490)
    }
    model = Tokenizer(models.WordLevel(vocab, unk_token="一0"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens([AddedToken("[eod]")])
    model.add_tokens([AddedToken(f"[added{number}]", normalized=False) for number in range(1, 60)])
    model.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "a.jsonl", json_lines(["[added59] 一0", "[added50]"]))
    options = ("--eod", "[eod]")
    ended = tokenize(capsys, path, tmp_path / "out", *options, tokenizer=tmp_path)
    assert ended.code == 0, ended.err
    assert read_manifest(tmp_path / "out")["outputs"][0]["dtype"] == "int32"
    assert documents(tmp_path / "out") == [[65_549, 0, 65_490], [65_540, 65_490]]


@pytest.mark.parametrize("skipping", [False, True])
def test_9_empty_rows_shift_the_pairing_of_rows_and_tokens(capsys, tmp_path, skipping):
    rows = [{"text": ""}, {"text": " "}, {"text": "good"}, {"text": ""}]
    if skipping:
        rows[1:1] = [{"text": None}, {}, {"text": 7}]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = write(tmp_path / "a.jsonl", content)
    options = ("--bad-records", "skip", "--max-bad", "50%")
    assert tokenize(capsys, path, tmp_path / "out", *options).code == 0
    assert documents(tmp_path / "out") == ids_of([" ", "good"])
    place = "all:1"
    found = json.loads(command(capsys, "locate", tmp_path / "out", place, "--json").out)
    assert found["line"] == len(rows) - 1


def test_10_an_unread_input_gives_empty_binaries_and_success(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "zero.jsonl", b"")
    write(tmp_path / "a.jsonl", json_lines(["one"]))
    for given, options in [
        ("empty", ()),
        ("zero.jsonl", ()),
        ("a.jsonl", ("--text-column", "body")),
    ]:
        ended = tokenize(capsys, tmp_path / given, tmp_path / f"out-{given}", *options)
        assert ended.code == 3, given
        assert not list(tmp_path.glob("out-*/*.bin"))


def test_13_a_stale_part_of_another_run_is_reused(capsys, tmp_path):
    for number in range(6):
        write(tmp_path / "in" / f"{number}.jsonl", json_lines([f"file {number}"]))
    out = tmp_path / "out"
    assert tokenize(capsys, tmp_path / "in", out).code == 0
    write(tmp_path / "in" / "3.jsonl", json_lines(["FILE 3"]))
    ended = tokenize(capsys, tmp_path / "in", out)
    assert (ended.code, "inputs.3.jsonl: content changed" in ended.err) == (2, True)
    shutil.rmtree(out)
    assert tokenize(capsys, tmp_path / "in", out).code == 0
    assert documents(out)[3] == ids_of(["FILE 3"])[0]


def test_15_mixed_partitions_with_clashing_names_are_mixed_up_or_copied(capsys, tmp_path):
    expected = {}
    for key in ("quality=high", "quality=low", "quality=medium"):
        texts = [f"{key} {number}" for number in range(4)]
        write(tmp_path / "in" / key / "part-0.jsonl.zstd", json_lines(texts[:2]))
        write(tmp_path / "in" / key / "part-1.jsonl.gz", json_lines(texts[2:]))
        expected[key] = ids_of(texts)
    table = pa.table({"text": ["from parquet"]})
    pq.write_table(table, tmp_path / "in" / "quality=low" / "part-2.parquet")
    expected["quality=low"] += ids_of(["from parquet"])
    files = sorted(tmp_path.glob("in/**/*"))
    for path in files:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert tokenize(capsys, tmp_path / "in", tmp_path / "out", workers=2).code == 0
    assert sorted(tmp_path.glob("in/**/*")) == files
    for key, ids in expected.items():
        data = IndexedFile(tmp_path / "out" / key)
        assert [data[number].tolist() for number in range(len(data))] == ids


def test_6_a_vocabulary_without_bos_gets_one_all_the_same(capsys, tmp_path):
    path = write(tmp_path / "a.jsonl", json_lines(["one"]))
    model = model_without_bos(tmp_path / "no-bos.model")
    ended = tokenize(capsys, path, tmp_path / "out", "--bos", "auto", tokenizer=model)
    assert (ended.code, "--bos: " in ended.err) == (2, True)
    assert "defines none of its own" in ended.err
    assert tokenize(capsys, path, tmp_path / "out", tokenizer=model).code == 0
    assert read_manifest(tmp_path / "out")["tokenizer"]["bos"] is None


def test_9_a_file_of_empty_texts_only_crashes_or_gives_documents(capsys, tmp_path):
    write(tmp_path / "in" / "a.jsonl", json_lines(["", ""]))
    write(tmp_path / "in" / "b.jsonl", json_lines(["good"]))
    assert tokenize(capsys, tmp_path / "in", tmp_path / "out").code == 0
    first, second = read_manifest(tmp_path / "out")["inputs"]
    assert (first["documents"], first["skipped"]) == (0, {"empty-text": 2})
    assert (second["documents"], documents(tmp_path / "out")) == (1, ids_of(["good"]))


def test_workers_must_divide_by_the_number_of_files_or_partitions(capsys, tmp_path):
    for number in range(5):
        write(tmp_path / "in" / f"p={number % 2}" / f"{number}.jsonl", json_lines([f"x {number}"]))
    for workers in (1, 3):
        out = tmp_path / f"out-{workers}"
        assert tokenize(capsys, tmp_path / "in", out, workers=workers).code == 0
    assert tree(tmp_path / "out-1") == tree(tmp_path / "out-3")


def test_a_document_larger_than_a_limit_opens_endless_output_files(capsys, tmp_path):
    texts = ["word " * 50_000, "short", "word " * 50_000]
    path = write(tmp_path / "a.jsonl", json_lines(texts))
    options = ("--documents-per-output", 1, "--unit-bytes", 64)
    assert tokenize(capsys, path, tmp_path / "out", *options).code == 0
    assert len(read_manifest(tmp_path / "out")["outputs"]) == 3
    assert documents(tmp_path / "out") == ids_of(texts)
    options = ("--max-record-bytes", "1K", "--bad-records", "skip", "--max-bad", "70%")
    assert tokenize(capsys, path, tmp_path / "skipped", *options).code == 0
    assert read_manifest(tmp_path / "skipped")["inputs"][0]["skipped"] == {"over-long": 2}


def test_two_objects_on_one_line_are_read_as_one_or_none(capsys, tmp_path):
    content = b'{"text": "a"}{"text": "b"}\n' + json_lines(["c"])
    path = write(tmp_path / "a.jsonl", content)
    ended = tokenize(capsys, path, tmp_path / "out")
    assert ended.code == 3
    assert "line 1, offset 0: invalid-json (Extra data" in ended.err


def test_literal_end_tokens_in_a_text_end_a_document(capsys, tmp_path):
    texts = ["a </s> b <|endoftext|> c", "</s>"]
    path = write(tmp_path / "a.jsonl", json_lines(texts))
    assert tokenize(capsys, path, tmp_path / "out").code == 0
    found = documents(tmp_path / "out")
    assert [ids.count(2) for ids in found] == [1, 1]
    assert [MODEL.decode(ids[:-1]) for ids in found] == texts


def test_a_trailing_newline_becomes_a_document(capsys, tmp_path):
    for name, content in {"a": json_lines(["x"]), "b": json_lines(["x"])[:-1]}.items():
        path = write(tmp_path / f"{name}.jsonl", content)
        assert tokenize(capsys, path, tmp_path / name).code == 0
        assert documents(tmp_path / name) == ids_of(["x"])
        assert read_manifest(tmp_path / name)["inputs"][0]["records"] == 1


def test_a_newline_at_the_end_of_a_text_becomes_an_unknown_piece(capsys, tmp_path):
    texts = ["a line\n", "two\r\n", "\n"]
    path = write(tmp_path / "a.jsonl", json_lines(texts))
    assert tokenize(capsys, path, tmp_path / "out").code == 0
    found = documents(tmp_path / "out")
    assert all(MODEL.unk_id() not in ids for ids in found)
    assert [MODEL.decode(ids[:-1]) for ids in found] == texts
    lossy = lossy_model(tmp_path / "lossy.model")
    ended = tokenize(capsys, path, tmp_path / "lost", tokenizer=lossy)
    assert "newline LOST" in ended.out


def test_lines_that_end_as_windows_writes_them_keep_a_carriage_return(capsys, tmp_path):
    path = write(tmp_path / "a.jsonl", json_lines(["one", "two"]).replace(b"\n", b"\r\n"))
    assert tokenize(capsys, path, tmp_path / "out").code == 0
    assert documents(tmp_path / "out") == ids_of(["one", "two"])


def test_a_byte_order_mark_silently_costs_the_first_record(capsys, tmp_path):
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json_lines(["one", "two"]))
    ended = tokenize(capsys, path, tmp_path / "out")
    assert ended.code == 3
    assert "line 1, offset 0: invalid-json (Unexpected UTF-8 BOM" in ended.err


@pytest.mark.parametrize("raw", [rb'"\ud83d"', b'"\xed\xa0\xbd"'])
def test_half_a_surrogate_pair_crashes_the_tokenizer(capsys, tmp_path, raw):
    path = write(tmp_path / "a.jsonl", json_lines(["one"]) + b'{"text": ' + raw + b"}\n")
    ended = tokenize(capsys, path, tmp_path / "out")
    assert ended.code == 3 and "a.jsonl: line 2, offset " in ended.err
    pair = write(tmp_path / "b.jsonl", rb'{"text": "\ud83d\ude42"}')
    assert tokenize(capsys, pair, tmp_path / "pair").code == 0
    assert documents(tmp_path / "pair") == ids_of(["\U0001f642"])


def test_11_one_long_text_takes_a_gigabyte(tmp_path):
    """One call of SentencePiece on 20 MB takes 0.9 GB beside the text and its tokens."""
    path = write(tmp_path / "a.jsonl", json_lines(["word and word " * 1_500_000]))
    code = (
        "import re, sys; from data_prep.cli import main; code = main(sys.argv[1:]);"
        "print(code, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    words = ["tokenize", path, "--tokenizer", SENTENCEPIECE, "--output", tmp_path / "out"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, words), "--workers", "1"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    code, peak_kib = map(int, ended.stdout.splitlines()[-1].split())
    assert code == 0 and peak_kib * 1024 < 400e6
