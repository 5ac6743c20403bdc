"""Attention of decode rows on a CPU in one call (`native/attention.c`). Reference: `paged.attention_reference`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.native.library import NativeAttention, NativeLibrary

DTYPES = (torch.float32, torch.bfloat16)
_MIN_PARALLEL_NUMBERS = 1 << 17
"""Keys and values of shorter rows are read in less time than waking threads takes."""


def native_attention(
    library: NativeLibrary,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: AttentionRules,
    batch: Batch,
    key_pages: Tensor,
    value_pages: Tensor,
) -> Tensor:
    """As `attention`, for a batch of decode rows in one of `DTYPES`, whose pages have the dtype of q."""
    rows, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    lengths, table = batch.once(
        "native attention",
        lambda: (batch.lengths[:rows].long(), batch.page_table[batch.rows[:rows]].long()),
    )
    norms = [None if scale is None else scale.float() for scale in (rules.q_scale, rules.k_scale)]
    out = torch.empty(rows, heads, dim, dtype=q.dtype)
    call = NativeAttention(
        *(tensor.data_ptr() for tensor in (q, k, v, key_pages, value_pages, out)),
        *(None if norm is None else norm.data_ptr() for norm in norms),
        *(tensor.data_ptr() for tensor in (rules.rope, batch.positions, batch.slots, lengths, table)),
        *(rows, heads, kv_heads, dim, rules.rope.shape[1], page_tokens, table.shape[1], rules.window or 0),
        *(q.stride(0), q.stride(1), k.stride(0), v.stride(0)),
        *(rules.scale, rules.eps, q.dtype == torch.bfloat16),
    )
    is_small = rows * batch.max_length * kv_heads * dim < _MIN_PARALLEL_NUMBERS
    threads = 1 if is_small else torch.get_num_threads()
    if library.attention(ctypes.byref(call), library.parallel, threads):
        raise MemoryError("no memory for the scores of an attention")
    return out
