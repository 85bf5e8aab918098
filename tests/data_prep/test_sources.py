import gzip
import os
import subprocess
import sys

import pytest

from data_prep import sources
from data_prep.errors import DataError, UsageError
from tests.data_prep.helpers import REPOSITORY

PARTITIONS = [
    "quality=high/kind=actual/kind2=actual",
    "quality=high/kind=synthetic/kind2=distill",
    "quality=low/kind=actual/kind2=actual",
]


@pytest.fixture
def nemotron(tmp_path):
    for partition in PARTITIONS:
        for number in (0, 1):
            path = tmp_path / "data-jsonl" / partition / f"CC-MAIN-2013-20-part-{number:05d}.zstd"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
    return tmp_path / "data-jsonl"


def test_equal_base_names_in_several_partitions_stay_apart(nemotron):
    found = sources.find(nemotron)
    assert len({source.name for source in found}) == 6
    assert [source.partition for source in found] == [p for p in PARTITIONS for _ in (0, 1)]


def test_where_selects_by_hive_keys(nemotron):
    found = sources.find(nemotron, where="quality=high,low kind=actual")
    assert {source.partition for source in found} == {PARTITIONS[0], PARTITIONS[2]}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("quality=hihg", "no input has quality=hihg .there are: high, low"),
        ("qualty=high", "no input has the key 'qualty' .keys in the paths: kind, kind2, quality"),
        ("quality", "not of the form key=value"),
        ("quality=low kind=synthetic", "no input file matches all"),
    ],
)
def test_a_where_that_selects_nothing_is_refused(nemotron, where, message):
    with pytest.raises(UsageError, match=message):
        sources.find(nemotron, where=where)


def test_a_subtree_keeps_its_partition(nemotron):
    found = sources.find(nemotron / "quality=high" / "kind=synthetic")
    assert {source.partition for source in found} == {PARTITIONS[1]}


def test_a_list_names_files_below_its_root(nemotron, tmp_path):
    names = [f"data-jsonl/{partition}/CC-MAIN-2013-20-part-00001.zstd" for partition in PARTITIONS]
    listed = tmp_path / "data-jsonl.paths.gz"
    listed.write_bytes(gzip.compress("\n".join(names).encode()))
    assert [source.name for source in sources.find(listed)] == sorted(names)
    moved = tmp_path / "elsewhere" / "some.paths"
    moved.parent.mkdir()
    moved.write_text("\n".join(names))
    assert [s.name for s in sources.find(moved, root=tmp_path)] == sorted(names)


def test_a_listed_file_that_was_never_downloaded_is_named(nemotron, tmp_path):
    listed = tmp_path / "data-jsonl.paths"
    listed.write_text("data-jsonl/missing-one\ndata-jsonl/missing-two\n")
    with pytest.raises(DataError, match=r"2 of 2 files are not below .*missing-one"):
        sources.find(listed)


def test_a_path_that_is_listed_twice_is_refused(nemotron, tmp_path):
    name = f"data-jsonl/{PARTITIONS[0]}/CC-MAIN-2013-20-part-00001.zstd"
    (tmp_path / "a.paths").write_text(f"{name}\n{name}\n")
    with pytest.raises(DataError, match="more than once"):
        sources.find(tmp_path / "a.paths")


def test_what_writers_leave_beside_data_is_not_data(nemotron):
    (nemotron / "_SUCCESS").touch()
    (nemotron / PARTITIONS[0] / ".part-0.crc").touch()
    assert len(sources.find(nemotron)) == 6


def test_an_empty_folder_and_a_missing_path_are_errors(tmp_path):
    with pytest.raises(DataError, match="holds no files"):
        sources.find(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        sources.find(tmp_path / "nowhere")


def test_a_folder_that_may_not_be_listed_is_passed_over(nemotron):
    """By os.walk, silently; the files below it would be missing from the output."""
    hidden = nemotron / PARTITIONS[2]
    nemotron.parent.chmod(0o755)
    hidden.chmod(0o300)
    code = (
        "import os, sys, pathlib; from data_prep import sources\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sources.find(pathlib.Path(sys.argv[1]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, nemotron],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"DataError: input {hidden}: cannot be listed (permission denied)" in found.stderr


def test_a_link_to_a_folder_above_gives_its_documents_forty_times(nemotron):
    (nemotron / "quality=high" / "again").symlink_to(nemotron)
    with pytest.raises(DataError, match=r"again: is .*data-jsonl by another name .a link.."):
        sources.find(nemotron)


def test_a_cache_of_links_beside_its_files_gives_every_document_twice(nemotron):
    first = nemotron / PARTITIONS[0] / "CC-MAIN-2013-20-part-00000.zstd"
    (nemotron / "snapshot").symlink_to(first)
    with pytest.raises(DataError, match=r"snapshot: is .* by another name"):
        sources.find(nemotron)
    listed = nemotron / "some.paths"
    name = first.relative_to(nemotron).as_posix()
    listed.write_text(f"{name}\n{name.replace('/', '//', 1)}\n")
    with pytest.raises(DataError, match="by another name"):
        sources.find(listed)
    first.unlink()
    with pytest.raises(DataError, match="snapshot: no such file or directory"):
        sources.find(nemotron)


def test_a_pipe_among_the_files_is_waited_for_forever(nemotron):
    os.mkfifo(nemotron / "pipe")
    with pytest.raises(DataError, match="pipe: is no regular file"):
        sources.find(nemotron)


@pytest.mark.parametrize("name", [b"a\nb.jsonl", b"caf\xe9.jsonl", b"\x1b[31m.jsonl"])
def test_a_name_that_no_manifest_can_hold_is_refused_in_one_line(nemotron, name):
    (nemotron / os.fsdecode(name)).touch()
    with pytest.raises(DataError, match=r"its name holds .* rename it") as refused:
        sources.find(nemotron)
    assert str(refused.value).isascii() and str(refused.value).isprintable()


def test_names_with_spaces_and_of_any_script_are_names(nemotron):
    path = nemotron / "my data" / "日本 語.jsonl"
    path.parent.mkdir()
    path.touch()
    assert "my data/日本 語.jsonl" in {source.name for source in sources.find(nemotron)}


@pytest.mark.parametrize("value", ["high.validation", "high-00001"])
def test_a_partition_named_as_another_ones_output_is_written_over(tmp_path, value):
    for folder in ("quality=high", f"quality={value}", "region=us-90210"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").touch()
    with pytest.raises(DataError, match="may be; rename it"):
        sources.find(tmp_path)
    (tmp_path / f"quality={value}" / "a").unlink()
    assert len(sources.find(tmp_path)) == 2
