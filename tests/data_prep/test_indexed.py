import numpy as np
import pytest

from data_prep import indexed
from data_prep.errors import DataError
from data_prep.indexed import IndexedFile

DOCUMENTS = [[5, 2], [7, 8, 9, 2], [2], [65_499, 2]]


def write(prefix, documents, dtype):
    lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
    prefix.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    halves = lambda: iter([lengths[:3], lengths[3:3], lengths[3:]])  # noqa: E731
    indexed.write_index(prefix.with_suffix(".idx"), np.dtype(dtype), halves, len(documents))


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_the_index_is_byte_for_byte_that_of_megatron_core(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    write(tmp_path / "ours", DOCUMENTS, dtype)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for ids in DOCUMENTS:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        ours, theirs = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("ours", "theirs"))
        assert ours == theirs
    data = IndexedDataset(str(tmp_path / "ours"))
    assert [data[number].tolist() for number in range(len(data))] == DOCUMENTS


def test_what_was_written_is_read_back(tmp_path):
    write(tmp_path / "a", DOCUMENTS, "<u2")
    data = IndexedFile(tmp_path / "a")
    assert [data[number].tolist() for number in range(len(data))] == DOCUMENTS
    assert data.boundaries.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocab_size", [1000, 65_499, 65_500, 65_536, 65_537, 131_072])
def test_the_dtype_is_the_one_that_megatron_picks(vocab_size):
    from megatron.core.datasets.indexed_dataset import DType

    assert indexed.dtype_for(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size))


@pytest.mark.parametrize("ids", [[1, 70_000], [-1, 3], [65_499 + 1]])
def test_an_id_that_does_not_fit_aborts_instead_of_wrapping(ids):
    with pytest.raises(DataError, match="outside its vocabulary of 65499"):
        indexed.packed(np.array(ids), 65_499)


def test_a_short_binary_and_a_short_index_are_named(tmp_path):
    write(tmp_path / "a", DOCUMENTS, "<u2")
    bin_path, idx_path = tmp_path / "a.bin", tmp_path / "a.idx"
    whole = bin_path.read_bytes()
    bin_path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"a\.bin: holds 8 tokens where its index counts 9"):
        IndexedFile(tmp_path / "a")
    bin_path.write_bytes(whole)
    for size in (0, 20, 100):
        idx_path.write_bytes(idx_path.read_bytes()[:size])
        with pytest.raises(DataError, match=r"a\.idx"):
            IndexedFile(tmp_path / "a")
