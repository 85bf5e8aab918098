"""Finished outputs: verified, located, joined and weighed."""

import itertools
import json
import random
import shutil

import pytest
import yaml

from data_prep.outputs import read_manifest
from tests.data_prep.helpers import (
    SENTENCEPIECE,
    TEKKEN,
    command,
    json_lines,
    small_disk,
    tree,
    write,
)
from tests.data_prep.kills import killed_at

PARTITIONS = [
    "quality=high/kind=actual/kind2=actual",
    "quality=high/kind=synthetic/kind2=diverse_qa_pairs",
    "quality=high/kind=synthetic/kind2=distill",
    "quality=low/kind=actual/kind2=actual",
]
OPTIONS = ("--validation", "10%", "--unit-bytes", "2K", "--bad-records", "skip", "--max-bad", "5%")


def tokenize(capsys, given, out, *options, tokenizer=SENTENCEPIECE):
    fixed = ("--tokenizer", tokenizer, "--output", out, "--workers", 1)
    return command(capsys, "tokenize", given, *fixed, *options)


@pytest.fixture
def source(tmp_path):
    for place, partition in enumerate(PARTITIONS):
        texts = [f"{partition} line {line} " * (1 + place) for line in range(60)]
        content = json_lines(texts[:30]) + b"broken\n" + json_lines(texts[30:])
        write(tmp_path / "in" / partition / "part-0.jsonl.zstd", content, [99])
    return tmp_path / "in"


@pytest.fixture
def out(capsys, tmp_path, source):
    ended = tokenize(capsys, source, tmp_path / "out", *OPTIONS)
    assert ended.code == 0, ended.err
    return tmp_path / "out"


def test_a_whole_output_verifies_against_its_source(capsys, out):
    ended = command(capsys, "verify", out, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["documents"] == 240 and found["compared_with_source"] >= 10


@pytest.mark.parametrize("name", ["verify", "inspect", "merge", "tokenize"])
def test_another_tools_manifest_ends_in_one_line(capsys, tmp_path, source, name):
    for content in ('{"files": []}', "[1]"):
        write(tmp_path / "other" / "manifest.json", content.encode())
        if name == "tokenize":
            ended = tokenize(capsys, source, tmp_path / "other")
        else:
            options = ("--output", tmp_path / "out") if name == "merge" else ()
            ended = command(capsys, name, tmp_path / "other", *options)
        assert (ended.code, "is no manifest of data_prep's format 1" in ended.err) == (3, True)


def test_a_moved_source_is_no_damage_and_can_be_named(capsys, out, source, tmp_path):
    source.rename(tmp_path / "moved")
    ended = command(capsys, "verify", out)
    assert (ended.code, "not compared with the source" in ended.out) == (0, True)
    ended = command(capsys, "verify", out, "--root", tmp_path / "moved")
    assert "documents tokenised again" in ended.out


def test_every_damaged_file_is_named(capsys, out):
    whole = tree(out)
    for name, content in whole.items():
        if name == "rejects.jsonl":
            continue
        path = out / name
        for damaged in (content[:-2], content[: len(content) // 2], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            ended = command(capsys, "verify", out)
            missing_manifest = name == "manifest.json" and damaged is None
            assert ended.code == (2 if missing_manifest else 3), (name, ended)
            assert name in ended.err, ended.err
        if name.endswith((".bin", ".idx")):
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            ended = command(capsys, "verify", out)
            assert (ended.code, f"{name}: was changed" in ended.err) == (3, True)
        path.write_bytes(content)
    assert command(capsys, "verify", out).code == 0


def test_a_document_without_eod_is_found_even_where_hashes_agree(capsys, out):
    import hashlib

    manifest = read_manifest(out)
    row = manifest["outputs"][0]
    path = out / row["path"]
    content = bytearray(path.read_bytes())
    content[-2:] = (7).to_bytes(2, "little")
    path.write_bytes(content)
    row["sha256"] = hashlib.sha256(content).hexdigest()
    (out / "manifest.json").write_text(json.dumps(manifest))
    ended = command(capsys, "verify", out)
    assert (ended.code, "does not end with the EOD 2" in ended.err) == (3, True)


def test_a_source_that_gives_other_documents_is_found(capsys, out, source):
    path = source / PARTITIONS[0] / "part-0.jsonl.zstd"
    size = path.stat().st_size
    for padding in range(200):  # another text of the same compressed size
        texts = [f"{PARTITIONS[0]} line {line + 1} " for line in range(60)] + ["x" * padding]
        write(path, json_lines(texts), [99])
        if path.stat().st_size == size:
            break
        path.write_bytes(path.read_bytes()[:size].ljust(size, b"\0"))
    ended = command(capsys, "verify", out)
    assert ended.code == 3, ended


def test_inspect_shows_counts_lengths_and_the_first_documents(capsys, out):
    found = json.loads(command(capsys, "inspect", out, "--documents", 2, "--json").out)
    row = found["outputs"][0]
    assert row["prefix"] == PARTITIONS[0]
    assert sum(row["lengths"].values()) == row["documents"]
    assert len(row["first"]) == 2 and row["first"][0].startswith(f"{PARTITIONS[0]} line ")
    assert command(capsys, "inspect", out).code == 0


def test_documents_and_lines_lead_to_each_other(capsys, out):
    for row in read_manifest(out)["outputs"]:
        for document in {0, row["documents"] // 2, row["documents"] - 1}:
            there = json.loads(
                command(capsys, "locate", out, f"{row['prefix']}:{document}", "--json").out
            )
            back = command(capsys, "locate", out, f"{there['input']}:{there['line']}", "--json")
            assert json.loads(back.out) == there


def test_a_line_that_gave_no_document_is_said_to(capsys, out):
    ended = command(capsys, "locate", out, f"{PARTITIONS[0]}/part-0.jsonl.zstd:31")
    assert (ended.code, "line 31 gave no document" in ended.err) == (2, True)
    ended = command(capsys, "locate", out, f"{PARTITIONS[0]}:1000")
    assert (ended.code, "has no document 1000" in ended.err) == (2, True)


@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_shards_joined_in_any_order_are_the_bytes_of_one_run(capsys, tmp_path, source, out, count):
    shards = []
    for index in range(count):
        shard = tmp_path / f"shard-{index}"
        ended = tokenize(capsys, source, shard, *OPTIONS, "--shard", f"{index}/{count}")
        assert ended.code == 0, ended.err
        shards.append(shard)
    if count == 1:
        assert tree(shards[0]) == tree(out)
        return
    joined = tmp_path / "joined"
    ended = command(capsys, "merge", *shards[::-1], "--output", joined)
    assert ended.code == 0, ended.err
    assert tree(joined) == tree(out)
    missing = command(capsys, "merge", *shards[1:], "--output", tmp_path / "missing")
    assert (missing.code, f"shards 0/{count} are missing" in missing.err) == (2, True)


def test_a_merge_that_is_killed_at_any_point_is_taken_up(capsys, tmp_path, source, out):
    shards = [tmp_path / f"shard-{index}" for index in range(2)]
    for index, shard in enumerate(shards):
        assert tokenize(capsys, source, shard, *OPTIONS, "--shard", f"{index}/2").code == 0
    joined = tmp_path / "joined"
    for point in itertools.count(1, 5):
        shutil.rmtree(joined, ignore_errors=True)
        if not killed_at(point, joined, ["merge", *shards, "--output", joined]):
            break
        finished = (joined / "manifest.json").exists()
        ended = command(capsys, "merge", *shards, "--output", joined)
        assert ended.code == 0 or finished, (point, ended.err)
        assert {name: content for name, content in tree(joined).items()
                if not name.startswith(".work")} == tree(out), point  # fmt: skip
    assert point > 40


@pytest.fixture
def shards(capsys, tmp_path, source):
    """Three shards; a later step of the same test may break them off and begin anew."""
    found = [tmp_path / "kept" / f"shard-{index}" for index in range(3)]
    for index, shard in enumerate(found):
        assert tokenize(capsys, source, shard, *OPTIONS, "--shard", f"{index}/3").code == 0
    return found


def test_a_merge_that_consumes_its_inputs_needs_no_room_for_both_and_can_be_killed(
    capsys, tmp_path, shards, out
):
    consumed = [tmp_path / "work" / shard.name for shard in shards]
    joined = tmp_path / "work" / "joined"
    arguments = ["merge", *consumed, "--output", joined, "--consume"]
    for point in itertools.count(1, 9):
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", tmp_path / "work")
        write(consumed[0] / "notes.txt", b"mine")
        killed = killed_at(point, tmp_path / "work", arguments)
        if killed:
            ended = command(capsys, *arguments)
            finished = (joined / "manifest.json").exists()
            assert ended.code == 0 or finished, (point, ended.err)
        assert {name: content for name, content in tree(joined).items()
                if not name.startswith(".work")} == tree(out), point  # fmt: skip
        assert tree(consumed[0]) == {"notes.txt": b"mine"} and not consumed[1].exists()
        if not killed:
            break
    assert point > 90


def test_a_merge_that_cannot_fit_is_refused_before_it_begins(capsys, tmp_path, shards, out):
    whole = sum(path.stat().st_size for path in out.rglob("*.bin"))
    with small_disk(tmp_path / "disk", f"{whole // 1024 + 12}k"):
        joined = tmp_path / "disk" / "joined"
        (tmp_path / "disk" / "ballast").write_bytes(bytes(16 << 10))
        for options in ((), ("--consume",)):  # the shards lie on another disk
            ended = command(capsys, "merge", *shards, "--output", joined, *options)
            assert (ended.code, "are needed and" in ended.err) == (1, True), ended
        assert not joined.exists()
    assert all((shard / "manifest.json").exists() for shard in shards)


def test_a_merge_that_began_to_consume_is_not_taken_up_as_one_that_copies(capsys, tmp_path, shards):
    joined = tmp_path / "joined"
    arguments = ["merge", *shards, "--output", joined]
    assert killed_at(60, tmp_path, [*arguments, "--consume"])
    ended = command(capsys, *arguments)
    assert (ended.code, "--consume: was" in ended.err) == (2, True)
    assert command(capsys, *arguments, "--consume").code == 0


def test_a_partial_prefix_takes_the_outputs_below_it_and_the_rest_is_left_to_others(capsys, out):
    whole = {row["prefix"]: row["tokens"] for row in read_manifest(out)["outputs"]}
    ended = command(capsys, "blend", out, "--set", "quality=high=0.7", "--json")
    rows = {row["prefix"]: row["weight"] for row in json.loads(ended.out)["train"]}
    high = sum(whole[prefix] for prefix in PARTITIONS[:3])
    for prefix in PARTITIONS[:3]:
        assert rows[prefix] == pytest.approx(0.7 * whole[prefix] / high)
    assert rows[PARTITIONS[3]] == pytest.approx(0.3)


def test_different_runs_are_joined_and_their_documents_stay_in_order(capsys, tmp_path, source):
    outs = []
    for name in ("quality=high", "quality=low"):
        outs.append(tmp_path / name[8:])
        assert tokenize(capsys, source / name, outs[-1], *OPTIONS).code == 0
    joined = tmp_path / "joined"
    ended = command(capsys, "merge", *outs, "--output", joined)
    assert ended.code == 0, ended.err
    for out in outs:
        for row in read_manifest(out)["outputs"]:
            for name in (row["path"], row["index"]["path"]):
                assert (joined / name).read_bytes() == (out / name).read_bytes()
    assert command(capsys, "verify", joined).code == 0
    ended = command(capsys, "merge", outs[0], joined, "--output", tmp_path / "twice")
    assert (ended.code, "its documents would double" in ended.err) == (2, True)


def test_outputs_of_different_tokenizers_are_not_joined(capsys, tmp_path, source, out):
    other = tmp_path / "other"
    assert tokenize(capsys, source, other, *OPTIONS, tokenizer=TEKKEN).code == 0
    ended = command(capsys, "merge", out, other, "--output", tmp_path / "joined")
    assert (ended.code, "tokenizer.fingerprint" in ended.err) == (2, True)
    with_bos = tmp_path / "bos"
    assert tokenize(capsys, source, with_bos, *OPTIONS, "--bos", "auto").code == 0
    ended = command(capsys, "merge", out, with_bos, "--output", tmp_path / "joined")
    assert (ended.code, "tokenizer.bos: was absent, now 1" in ended.err) == (2, True)
    assert not (tmp_path / "joined").exists()


def test_a_named_blend_takes_what_the_paper_takes(capsys, out):
    path = out / "hq.yaml"
    ended = command(capsys, "blend", out, "--use", "nemotron-cc-hq", "--output", path)
    assert ended.code == 0, ended.err
    made = yaml.safe_load(path.read_text())
    assert [row["prefix"] for row in made["train"]] == PARTITIONS[:2]
    assert sum(row["weight"] for row in made["train"]) == pytest.approx(1)
    assert (out / made["tokenizer"]["path"]).is_file()


def test_weights_are_set_and_epochs_shown_for_a_budget(capsys, out, tmp_path):
    whole = {row["prefix"]: row["tokens"] for row in read_manifest(out)["outputs"]}
    path = tmp_path / "elsewhere" / "blend.yaml"
    path.parent.mkdir()
    ended = command(
        capsys, "blend", out, "--set", f"{PARTITIONS[0]}=3", "--set", f"{PARTITIONS[1]}=1",
        "--set", f"{PARTITIONS[2]}=0", "--set", f"{PARTITIONS[3]}=0",
        "--tokens", "1M", "--output", path, "--json",
    )  # fmt: skip
    rows = json.loads(ended.out)["train"]
    assert [row["weight"] for row in rows] == pytest.approx([0.75, 0.25])
    assert rows[0]["epochs"] == pytest.approx(750_000 / whole[PARTITIONS[0]])
    prefix = yaml.safe_load(path.read_text())["train"][0]["prefix"]
    assert (path.parent / f"{prefix}.bin").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--use", "hq"), "--use 'hq': there are all, nemotron-cc-hq"),
        (("--set", "nothing=1"), "--set 'nothing': is no training prefix"),
        (("--set", "quality=hig=1"), "--set 'quality=hig': is no training prefix"),
        (("--set", "quality=high=1"), "the shares sum to 1, which leaves nothing for quality=low"),
        (("--set", "quality=low=.1", "--set", f"{PARTITIONS[3]}=.2"), "been given a share already"),
        (("--output", "nowhere/blend.yaml"), "there is no folder nowhere"),
    ],
)
def test_a_blend_of_what_is_not_there_is_refused(capsys, out, options, message):
    ended = command(capsys, "blend", out, *options)
    assert (ended.code, message in ended.err) == (2, True)


def test_a_dry_run_estimates_and_writes_nothing(capsys, tmp_path, source, out):
    manifest = read_manifest(out)
    shutil.rmtree(out)
    ended = tokenize(capsys, source, out, *OPTIONS, "--dry-run", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    tokens = sum(row["tokens"] for row in manifest["outputs"])
    assert found["tokens"] == pytest.approx(tokens, rel=0.25)
    assert found["output_bytes"] > 0 and found["hours"] > 0
    assert not out.exists()


def test_a_few_long_documents_weigh_as_much_as_many_short_ones_in_an_estimate(capsys, tmp_path):
    """Pooled over the files, equal samples of unequal files were 18 % off."""
    chance = random.Random(0)
    words = [chance.randbytes(3).hex() for _ in range(1000)]
    for name, count, length in [("a.zst", 9000, 20), ("b.gz", 60, 4000), ("c", 2000, 300)]:
        texts = [" ".join(chance.choices(words, k=length)) for _ in range(count)]
        write(tmp_path / "in" / f"p={name}", json_lines(texts))
    estimate = json.loads(
        tokenize(capsys, tmp_path / "in", tmp_path / "o", "--dry-run", "--json").out
    )
    exact = json.loads(tokenize(capsys, tmp_path / "in", tmp_path / "out", "--json").out)
    for key in ("documents", "tokens"):
        assert estimate[key] == pytest.approx(exact[key], rel=0.03)
    assert estimate["output_bytes"] == pytest.approx(exact["bytes"], rel=0.03)


def test_a_json_summary_is_one_object(capsys, tmp_path, source):
    ended = tokenize(capsys, source, tmp_path / "out", *OPTIONS, "--json")
    totals = json.loads(ended.out)
    assert totals["documents"] == 240 and totals["skipped"] == {"invalid-json": 4}
    assert totals["records"] == 244
