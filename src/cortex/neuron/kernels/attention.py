"""Attention over paged KV: one entry for a step's decode and prefill rows, and the torch reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.batch import Batch, PrefillRow


def paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, batch: Batch, scale: float, window: int | None
) -> Tensor:
    """q: [tokens, heads, dim], pages: [pages, page tokens, kv heads, dim] → [tokens, heads, dim].

    Each token attends to its own row's positions up to itself; with `window`, to the last `window` of them.
    The step's own keys and values must be in the pages already.
    """
    if not has_kernels(q):
        return paged_attention_reference(q, key_pages, value_pages, batch, scale, window)
    from cortex.neuron.kernels.decode_attention import decode_attention
    from cortex.neuron.kernels.prefill_attention import prefill_attention

    out = torch.empty_like(q)
    if batch.num_decodes:
        decode_attention(q, key_pages, value_pages, batch, scale, window, out)
    if batch.prefills:
        prefill_attention(q, key_pages, value_pages, batch, scale, window, out)
    return out


def paged_attention_reference(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, batch: Batch, scale: float, window: int | None
) -> Tensor:
    parts = []
    if batch.num_decodes:
        parts.append(_decode(q[: batch.num_decodes], key_pages, value_pages, batch, scale, window))
    for row in batch.prefills:
        tokens = q[row.offset : row.offset + row.count]
        parts.append(_prefill(tokens, key_pages, value_pages, batch.page_table[row.row], row, scale, window))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gather(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """[..., kv heads, length, dim] of the positions in the pages that `table` ([..., pages]) lists."""
    listed = pages.index_select(0, table.reshape(-1))
    rows = listed.view(*table.shape[:-1], -1, *pages.shape[2:])
    return rows.narrow(-3, 0, length).transpose(-3, -2)


def _decode(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, batch: Batch, scale: float, window: int | None
) -> Tensor:
    """All decode rows at once, padded to the longest. The query heads that share a kv head are its queries."""
    rows, heads, dim = q.shape
    lengths = batch.lengths[:rows]
    longest = int(lengths.max())
    num_pages = -(-longest // key_pages.shape[1])
    table = batch.page_table[batch.rows[:rows], :num_pages]
    k, v = _gather(key_pages, table, longest), _gather(value_pages, table, longest)
    mask = None
    if rows > 1 or window is not None:
        positions = torch.arange(longest)
        visible = positions < lengths[:, None]
        if window is not None:
            visible &= positions >= lengths[:, None] - window
        mask = visible[:, None, None]
    grouped = q.view(rows, k.shape[1], -1, dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(rows, heads, dim)


def _prefill(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    row: PrefillRow,
    scale: float,
    window: int | None,
) -> Tensor:
    """One row's chunk against everything before it and, causally, itself."""
    length = row.start + row.count
    table = table[: -(-length // key_pages.shape[1])]
    k, v = _gather(key_pages, table, length)[None], _gather(value_pages, table, length)[None]
    mask = None
    if row.start or window is not None:
        query = torch.arange(row.start, length)[:, None]
        position = torch.arange(length)
        mask = position <= query
        if window is not None:
            mask &= position > query - window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
