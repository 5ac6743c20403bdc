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
    kv_heads = key_pages.shape[2]
    call, _ = batch.once(("native attention", q.shape, key_pages.shape), lambda: _call(q, batch, key_pages))
    norms = [None if scale is None else scale.float() for scale in (rules.q_scale, rules.k_scale)]
    call.q_norm, call.k_norm = (None if norm is None else norm.data_ptr() for norm in norms)
    out = torch.empty(rows, heads, dim, dtype=q.dtype)
    call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    call.key_pages, call.value_pages, call.rope = key_pages.data_ptr(), value_pages.data_ptr(), rules.rope.data_ptr()
    call.q_stride, call.q_head_stride, call.k_stride, call.v_stride = *q.stride()[:2], k.stride(0), v.stride(0)
    call.rotated_dims, call.window, call.scale, call.eps = (
        rules.rope.shape[1],
        rules.window or 0,
        rules.scale,
        rules.eps,
    )
    is_small = rows * batch.max_length * kv_heads * dim < _MIN_PARALLEL_NUMBERS
    threads = 1 if is_small else torch.get_num_threads()
    if library.attention(ctypes.byref(call), library.parallel, threads):
        raise MemoryError("no memory for the scores of an attention")
    return out


def _call(q: Tensor, batch: Batch, key_pages: Tensor) -> tuple[NativeAttention, tuple[Tensor, ...]]:
    """What all layers of a step share, and the tensors that it points to."""
    rows, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    kept = (batch.positions, batch.slots, batch.lengths[:rows].long(), batch.page_table[batch.rows[:rows]].long())
    call = NativeAttention(rows=rows, heads=heads, kv_heads=kv_heads, dim=dim, page_tokens=page_tokens)
    call.positions, call.slots, call.lengths, call.page_table = (tensor.data_ptr() for tensor in kept)
    call.table_columns, call.is_half = kept[-1].shape[1], q.dtype == torch.bfloat16
    return call, kept
