"""Core attention on PyTorch's fused kernels, and document boundaries.

How document boundaries reach attention: `documents` turns the `cu_seqlens` of megatron-core's
GPTDataset (option inter_document_masking) into a PackedSeqParams, and the training loop passes that
as `model(…, packed_seq_params=documents(batch["cu_seqlens"]))` on every pipeline stage. Core hands
it through to core attention. Its qkv_format "sbhd" leaves everything else as it is: sequences keep
their shape, and rotary positions run through the sequence; they are relative, so attention inside
a document does not depend on where the document begins.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import scaled_dot_product_attention


def documents(cu_seqlens: torch.Tensor) -> PackedSeqParams:
    """Boundaries of the documents of a micro-batch, for `packed_seq_params`.

    cu_seqlens: [micro_batch, entries], integers on the CPU; each row rises from 0 to the sequence
    length, which may be repeated to fill the row. A sequence's end always ends a document.
    """
    sequence = int(cu_seqlens[0, -1])
    begins, ends = cu_seqlens[:, :-1], cu_seqlens[:, 1:]
    row_offset = torch.arange(len(cu_seqlens))[:, None] * sequence
    flat_begins = (begins + row_offset)[begins < ends]
    boundaries = torch.cat([flat_begins, torch.tensor([len(cu_seqlens) * sequence])]).int()
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        # Core takes the length of the rotary table from here.
        max_seqlen_q=sequence,
        max_seqlen_kv=sequence,
    )


class CoreAttention(torch.nn.Module):
    """Causal grouped-query attention without a mask: no S × S tensor is ever stored.

    With document boundaries it runs once for each document, so that the work is the sum of the
    squared document lengths. `from_core` is what core says beyond that, such as the layer number.
    """

    def __init__(self, softmax_scale: float | None = None, **from_core: object):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **from_core: object,
    ) -> torch.Tensor:
        """[s, b, heads, d], [s, b, kv_heads, d] twice -> [s, b, heads · d]."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("plain attention is causal and takes neither a mask nor a bias")
        sequence, batch = query.shape[:2]
        if packed_seq_params is None:
            # [s, b, n, d] -> [b, n, s, d] and back
            context = self._causal(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        # [s, b, n, d] -> [n, b · s, d], cut into documents [1, n, length, d]
        query, key, value = (
            x.permute(2, 1, 0, 3).reshape(1, x.shape[2], batch * sequence, -1).split(lengths, 2)
            for x in (query, key, value)
        )
        context = torch.cat(
            [self._causal(*document) for document in zip(query, key, value, strict=True)], dim=2
        )
        return context.view(-1, batch, sequence, context.shape[-1]).permute(2, 1, 0, 3).flatten(2)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
