"""Attention of decode rows on a CPU in one call (`native/attention.c`). Reference: `paged.attention_reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.rotate import normed_values
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.native.operations import DecodeAttention, compute, operation

DTYPES = (torch.float32, torch.bfloat16)
_MIN_PARALLEL_NUMBERS = 1 << 17
"""Keys and values of shorter rows are read in less time than waking threads takes."""


def native_attention(
    q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor
) -> Tensor:
    """As `attention`, for a batch of decode rows in one of `DTYPES`, whose pages have the dtype of q."""
    rows, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    norms = rules.q_scale, rules.k_scale
    is_norm_half = all(norm is not None and norm.dtype == torch.bfloat16 for norm in norms)
    q_norm, k_norm = (norm if norm is None or is_norm_half else norm.float() for norm in norms)
    v = normed_values(v, rules)
    out = torch.empty(rows, heads, dim, dtype=q.dtype)
    made = operation(
        DecodeAttention,
        is_half=q.dtype == torch.bfloat16,
        is_norm_half=is_norm_half,
        scale=rules.scale,
        eps=rules.eps,
        q=q,
        k=k,
        v=v,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=rules.sinks,
        key_pages=key_pages,
        value_pages=value_pages,
        out=out,
        rope=rules.rope,
        positions=batch.positions,
        rope_positions=batch.rope_positions,
        slots=batch.slots,
        table_rows=batch.rows,
        page_table=batch.page_table,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        rotated_dims=rules.rope.shape[1],
        pair_distance=rules.half,
        page_tokens=page_tokens,
        table_columns=batch.page_table.shape[1],
        window=rules.window or 0,
        q_stride=q.stride(0),
        q_head_stride=q.stride(1),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
    )
    compute(made, rows, is_small=rows * batch.max_length * kv_heads * dim < _MIN_PARALLEL_NUMBERS)
    return out
