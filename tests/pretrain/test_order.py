"""The one order of samples: a longer run begins like a shorter one, windows are left out."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.utils import Split

from megatron_ext.errors import ConfigError
from pretrain.config import load
from pretrain.order import Configs, Order, Part, skip
from tests.pretrain.corpus import write_corpus
from tests.ranks import run

LENGTH = 32


class _Tokenizer:
    eod, pad, vocab_size = 0, -1, 64
    unique_identifiers = {"name": "test"}  # noqa: RUF012


def read(rank, folder, prefixes, weights, size) -> list[bytes]:
    configs = Configs(
        random_seed=1,
        sequence_length=LENGTH,
        blend_per_split=[(prefixes, None), None, None],
        path_to_cache=str(folder),
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    parts = [Part(prefix, Split.train, configs) for prefix in prefixes]
    order = Order(parts, weights, size, folder / f"mix-{size}.npy")
    assert len(order) == size
    return [order[index]["tokens"].numpy().tobytes() for index in range(size)]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, documents=40, parts=2)
    return [str(folder / "part0"), str(folder / "part1")]


def test_a_longer_order_begins_like_a_shorter_one_also_over_the_edge_of_epochs(prefixes, tmp_path):
    (long,) = run(read, 1, tmp_path, prefixes, [0.7, 0.3], 1000)
    for size in (7, 100, 500):
        assert run(read, 1, tmp_path, prefixes, [0.7, 0.3], size) == [long[:size]]


def test_each_epoch_has_every_sample_of_it_once_and_its_own_order(prefixes, tmp_path):
    (samples,) = run(read, 1, tmp_path, prefixes[:1], [1.0], 1000)
    epoch = next(n for n in range(1, 1000) if len(set(samples[: n + 1])) < n + 1)
    tokens = np.concatenate([np.frombuffer(sample, np.int64) for sample in samples[:epoch]])
    assert 40 * 20 < len(tokens) < 40 * 125
    # Documents are shuffled anew, so that samples are cut at other places.
    assert len(set(samples[:epoch]) & set(samples[epoch : 2 * epoch])) < epoch / 2
    assert Counter(tokens[tokens == 0].tolist())[0] >= 30  # ends of most of the 40 documents


@st.composite
def windows(draw):
    bounds = sorted(draw(st.sets(st.integers(0, 60), max_size=8)))
    return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]


@given(windows(), st.integers(0, 60), st.integers(0, 60))
def test_skipping_is_counting_what_is_not_left_out(windows, start, count):
    left_out = {sample for first, after in windows for sample in range(first, after)}
    kept = [sample for sample in range(start, 200) if sample not in left_out]
    assert skip(start, count, windows) == kept[count]


@pytest.mark.parametrize("value", ["[[5,3]]", "[[0,5],[4,9]]", "[[5,9],[0,2]]", "[[3,3]]"])
def test_windows_that_overlap_or_fall_are_refused(value):
    with pytest.raises(ConfigError, match=r"data\.skip=.*must be pairs"):
        load("demo", ["data.blend=a", f"data.skip={value}"])


def test_tensors_are_int64(prefixes, tmp_path):
    (samples,) = run(read, 1, tmp_path, prefixes[:1], [1.0], 1)
    assert torch.frombuffer(bytearray(samples[0]), dtype=torch.int64).shape == (LENGTH,)
