import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import streams
from data_prep.errors import DataError
from tests.data_prep.helpers import compressed, write

CONTENT = b"".join(b'{"text": "line %d"}\n' % number for number in range(5000))
LIMIT = 1 << 20


def read(path):
    return b"".join(streams.chunks(path, streams.file_kind(path)))


@pytest.mark.parametrize("name", ["a.jsonl.zstd", "a.zst", "a.gz"])
def test_all_frames_are_read_and_a_record_may_cross_their_border(tmp_path, name):
    cuts = [0, 7, 7, 20_000, 20_003, len(CONTENT) - 1]  # mid-record, and two empty frames
    assert read(write(tmp_path / name, CONTENT, cuts)) == CONTENT


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_compression_is_known_by_content_not_by_name(tmp_path, suffix):
    path = tmp_path / "no-extension"
    path.write_bytes(compressed(CONTENT, suffix))
    assert read(path) == CONTENT


def test_skippable_frames_of_parallel_zstd_are_passed_over(tmp_path):
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    path = tmp_path / "a"
    path.write_bytes(skippable + compressed(CONTENT, ".zst") + skippable)
    assert read(path) == CONTENT


def test_padding_after_a_gzip_member_is_allowed(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(compressed(CONTENT, ".gz", [100]) + bytes(70_000))
    assert read(path) == CONTENT


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_a_file_that_was_cut_anywhere_is_an_error_that_says_where(tmp_path, suffix):
    whole = compressed(CONTENT, suffix)
    path = tmp_path / f"a{suffix}"
    for size in [0, 5, 6, 18, len(whole) // 2, len(whole) - 40, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=str(size)):
            read(path)


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_a_flipped_byte_or_garbage_after_the_end_is_an_error(tmp_path, suffix):
    whole = compressed(random.Random(0).randbytes(10_000), suffix)
    path = tmp_path / "a"
    path.write_bytes(whole + b"garbage at the end")
    with pytest.raises(DataError, match="corrupt"):
        read(path)
    if suffix == ".gz":  # zstandard writes no checksum unless asked to
        path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
        with pytest.raises(DataError, match="corrupt"):
            read(path)


def test_lines_are_split_at_newlines_only():
    content = "a\u2028b\u0085c\x0bd\x0ce\rf\ng".encode()
    assert [line for _, line in streams.lines(iter([content]), 0, LIMIT)] == content.split(b"\n")


def test_an_over_long_line_is_passed_over_and_its_neighbours_are_kept():
    parts = [b"ab\ncd", b"efg", b"hij\nkl\n", b"mnopqrst"]
    found = list(streams.lines(iter(parts), 0, 5))
    assert found == [(0, b"ab"), (3, None), (12, b"kl"), (15, None)]


@given(
    lines=st.lists(st.binary(max_size=6).map(lambda x: x.replace(b"\n", b"")), max_size=12),
    ends_with_newline=st.booleans(),
    grain=st.integers(1, 30),
    kind=st.sampled_from(["plain", "zstd", "gzip"]),
)
def test_units_share_out_each_line_exactly_once(
    tmp_path_factory, lines, ends_with_newline, grain, kind
):
    content = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    path = tmp_path_factory.mktemp("lines") / "a"
    path.write_bytes(compressed(content, {"plain": "", "zstd": ".zst", "gzip": ".gz"}[kind]))
    found = [
        item
        for start in range(0, len(content), grain)
        for item in streams.lines_starting_in(path, kind, start, start + grain, LIMIT)
    ]
    expected = content.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [line for _, line in found] == expected
    assert all(content[offset : offset + len(line)] == line for offset, line in found)
