"""Attention without a mask equals attention with an explicit one."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from megatron_ext.model import documents
from megatron_ext.model.attention import CoreAttention

SEQUENCE, BATCH, WIDTH = 12, 2, 8


def masked(query, key, value, document):
    """Explicit scores: [s, b, n, d] three times and [b, s] document numbers -> [s, b, n · d]."""
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) / WIDTH**0.5
    allowed = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    allowed = allowed & (document[:, :, None] == document[:, None, :])
    probabilities = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bnqk,kbnd->qbnd", probabilities, value).flatten(2)


@st.composite
def document_rows(draw) -> torch.Tensor:
    """cu_seqlens as GPTDataset gives them: [batch, sequence + 1], filled up with the end."""
    rows = []
    for _ in range(BATCH):
        ends = draw(st.sets(st.integers(1, SEQUENCE - 1)))
        row = [0, *sorted(ends), SEQUENCE]
        rows.append(row + [SEQUENCE] * (SEQUENCE + 1 - len(row)))
    return torch.tensor(rows, dtype=torch.int32)


@settings(max_examples=30)
@given(document_rows(), st.sampled_from([1, 2, 4]))
def test_documents_do_not_see_each_other(cu_seqlens, kv_heads):
    torch.manual_seed(0)
    inputs = [torch.randn(SEQUENCE, BATCH, n, WIDTH).double() for n in (4, kv_heads, kv_heads)]
    fast, slow = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    positions = torch.arange(SEQUENCE).repeat(BATCH, 1).int()
    document = torch.searchsorted(cu_seqlens, positions, right=True)

    result = CoreAttention()(*fast, None, packed_seq_params=documents(cu_seqlens))
    expected = masked(*slow, document)
    torch.testing.assert_close(result, expected)
    weight = torch.randn_like(expected)
    (result * weight).sum().backward()
    (expected * weight).sum().backward()
    for x, y in zip(fast, slow, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_without_documents_it_is_causal(kv_heads):
    inputs = [torch.randn(SEQUENCE, BATCH, n, WIDTH).double() for n in (4, kv_heads, kv_heads)]
    one_document = torch.zeros(BATCH, SEQUENCE)
    torch.testing.assert_close(CoreAttention()(*inputs, None), masked(*inputs, one_document))


def test_softmax_scale_is_kept():
    inputs = [torch.randn(SEQUENCE, BATCH, 2, WIDTH).double() for _ in range(3)]
    doubled = [inputs[0] * 2, *inputs[1:]]
    scaled = CoreAttention(softmax_scale=2 / WIDTH**0.5)(*inputs, None)
    torch.testing.assert_close(scaled, CoreAttention()(*doubled, None))


def test_a_mask_is_refused_rather_than_ignored():
    inputs = [torch.randn(SEQUENCE, BATCH, 2, WIDTH) for _ in range(3)]
    with pytest.raises(ValueError, match="neither a mask"):
        CoreAttention()(*inputs, torch.ones(SEQUENCE, SEQUENCE).bool())


def test_boundaries_run_through_the_micro_batch():
    packed = documents(torch.tensor([[0, 3, 8, 8, 8], [0, 8, 8, 8, 8]]))
    assert packed.cu_seqlens_q.tolist() == [0, 3, 8, 16]
    assert packed.max_seqlen_q == 8


def test_boundaries_of_megatron_datasets_lie_where_documents_end(tmp_path):
    prefix, end = str(tmp_path / "text"), 0
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in (3, 20, 1, 9, 40, 5) * 3:
        builder.add_document(numpy.array([7] * (length - 1) + [end]), [length])
    builder.finalize(f"{prefix}.idx")
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        path_to_cache=str(tmp_path / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=True,
        tokenizer=NullTokenizer(vocab_size=8, eod_id=end),
    )
    indexed = GPTDataset.build_low_level_dataset(prefix, config)
    dataset = GPTDataset(
        indexed, prefix, numpy.arange(18, dtype=numpy.int32), 8, Split.train, config
    )
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8)))

    after_end = (batch["tokens"] == end).flatten().nonzero().flatten() + 1
    row_starts = torch.arange(0, 8 * 16 + 1, 16)
    expected = sorted({*after_end.tolist(), *row_starts.tolist()})
    assert documents(batch["cu_seqlens"]).cu_seqlens_q.tolist() == expected
