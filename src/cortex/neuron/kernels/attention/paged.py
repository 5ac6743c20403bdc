"""Attention over paged KV for a whole step, from projected q, k and v to mixed values, and its reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.attention.native import DTYPES, native_attention
from cortex.neuron.kernels.attention.one_row import one_row_attention
from cortex.neuron.kernels.attention.rotate import Rotation, rotate_and_store, rotate_and_store_by
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.native.library import native_library_or_none


def attention(
    q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor
) -> Tensor:
    """q: [tokens, heads, dim], k and v: [tokens, kv heads, dim] (strided, each head dense) → [tokens, heads, dim].

    Norms q, k and v as the rules say, rotates q and k, stores k and v in the pages ([pages, page tokens, kv heads,
    dim]), and lets each token attend to the positions of its row up to itself.
    """
    if not has_kernels(q):
        if q.shape[0] != batch.num_decodes or key_pages.dtype != q.dtype or rules.softcap is not None:
            return attention_reference(q, k, v, rules, batch, key_pages, value_pages)
        if q.dtype in DTYPES and native_library_or_none() is not None:
            return native_attention(q, k, v, rules, batch, key_pages, value_pages)
        computed = one_row_attention if batch.num_decodes == 1 and rules.sinks is None else attention_reference
        return computed(q, k, v, rules, batch, key_pages, value_pages)
    from cortex.neuron.kernels.attention.decode import decode_attention
    from cortex.neuron.kernels.attention.prefill import prefill_attention

    decodes = batch.num_decodes
    out = batch.empty("attended", q.shape, q)
    if decodes:
        if batch.shares_rows:  # a token reads the keys and values of those before it in the same step
            new = q[:decodes], k[:decodes], v[:decodes]
            rotate_and_store(*new, rules, batch.rope_positions[:decodes], batch.slots[:decodes], key_pages, value_pages)
        decode_attention(q, k, v, rules, batch, key_pages, value_pages, out)
    if decodes == len(q):
        return out
    rotated = rotate_and_store(
        q[decodes:],
        k[decodes:],
        v[decodes:],
        rules,
        batch.rope_positions[decodes:],
        batch.slots[decodes:],
        key_pages,
        value_pages,
    )
    prefill_attention(rotated, rules, batch, key_pages, value_pages, out[decodes:])
    return out


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor
) -> Tensor:
    rotation = batch.once(
        ("rotation", id(rules.rope), q.dtype),
        lambda: Rotation.at(batch.rope_positions, rules.rope, q.dtype, rules.half),
    )
    q = rotate_and_store_by(rotation, q, k, v, rules, batch.slots, key_pages, value_pages)
    return attend_reference(q, rules, batch, key_pages, value_pages)


def attend_reference(q: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor) -> Tensor:
    """The attention of rotated queries to what is in the pages. Keys may be their own values."""
    parts = []
    if batch.num_decodes:
        parts.append(_decode(q[: batch.num_decodes], rules, batch, key_pages, value_pages))
    for row in batch.prefills:
        tokens = q[row.offset : row.offset + row.count]
        reach = None
        if rules.whole_pictures and batch.reach is not None:
            reach = batch.reach[row.offset : row.offset + row.count]
        parts.append(_prefill(tokens, rules, row, batch.page_table[row.row], key_pages, value_pages, reach))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gather(pages: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., kv heads, positions, dim] of the pages that `table` ([..., pages]) lists."""
    is_float8 = pages.dtype == torch.float8_e4m3fn
    listed = (pages.view(torch.uint8) if is_float8 else pages).index_select(0, table.reshape(-1))
    if is_float8:
        listed = listed.view(pages.dtype).to(dtype)
    return listed.view(*table.shape[:-1], -1, *pages.shape[2:]).transpose(-3, -2)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The positions that the decode rows of a step attend to."""

    table: Tensor
    """[rows, pages]: those that hold the positions of each row, from its window on; of a shorter row then any."""
    mask: Tensor
    """[rows, 1, 1, positions] bool"""

    @classmethod
    def of(cls, batch: Batch, page_tokens: int, window: int | None) -> _Decodes:
        lengths = batch.lengths[: batch.num_decodes].long()[:, None]
        begins = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
        first_pages = begins // page_tokens
        num_pages = int(((lengths - 1) // page_tokens - first_pages).max()) + 1
        columns = first_pages + torch.arange(num_pages, device=lengths.device)
        last = batch.page_table.shape[1] - 1
        table = batch.page_table[batch.rows[: batch.num_decodes, None], columns.clamp(max=last)]
        positions = first_pages * page_tokens + torch.arange(num_pages * page_tokens, device=lengths.device)
        visible = (positions >= begins) & (positions < lengths)
        return cls(table, visible[:, None, None])


def _decode(q: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor) -> Tensor:
    """All decode rows at once, padded to the longest. Query heads are grouped by the kv head they share."""
    rows, heads, dim = q.shape
    page_tokens = key_pages.shape[1]
    seen = batch.once(("decodes", page_tokens, rules.window), lambda: _Decodes.of(batch, page_tokens, rules.window))
    k = _gather(key_pages, seen.table, q.dtype)
    v = k if value_pages is key_pages else _gather(value_pages, seen.table, q.dtype)
    grouped, mask = q.view(rows, k.shape[1], -1, dim), seen.mask
    if rules.softcap is not None:
        return _capped(grouped, k, v, mask, rules.scale, rules.softcap).reshape(rows, heads, dim)
    if rules.sinks is not None:
        grouped, k, v, mask = _with_sinks(grouped, k, v, mask, rules.sinks.view(k.shape[1], -1, 1), rules.scale)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=rules.scale)
    return out[..., :dim].reshape(rows, heads, dim)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """q: [..., heads, queries, dim], k and v: [..., heads, positions, dim] → [..., heads, queries, dim]"""
    scores = torch.tanh(q @ k.mT * (scale / softcap)).float() * softcap
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v


def _prefill(
    q: Tensor,
    rules: AttentionRules,
    row: PrefillRow,
    table: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    reach: Tensor | None = None,
) -> Tensor:
    """The chunk of one row, attending to all earlier positions, or those in the window, and causally to itself, or as
    far as `reach` says."""
    page_tokens = key_pages.shape[1]
    length = row.start + row.count
    first_page = 0 if rules.window is None else max(0, row.start + 1 - rules.window) // page_tokens
    begin = first_page * page_tokens
    table = table[first_page : -(-length // page_tokens)]
    k = _gather(key_pages, table, q.dtype).narrow(-2, 0, length - begin)[None]
    v = k
    if value_pages is not key_pages:
        v = _gather(value_pages, table, q.dtype).narrow(-2, 0, length - begin)[None]
    mask = None
    has_rules = rules.window is not None or rules.sinks is not None or rules.softcap is not None
    if row.start or has_rules or reach is not None:
        query = torch.arange(row.start, length, device=q.device)[:, None]
        position = torch.arange(begin, length, device=q.device)
        mask = position <= query if reach is None else position < reach[:, None]
        if rules.window is not None:
            mask &= position > query - rules.window
    by_head = q.transpose(0, 1)[None]
    if rules.softcap is not None and mask is not None:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        return _capped(by_head, k, v, mask, rules.scale, rules.softcap)[0].transpose(0, 1)
    if rules.sinks is not None and mask is not None:
        by_head, k, v, mask = _with_sinks(by_head, k, v, mask, rules.sinks.view(-1, 1, 1), rules.scale)
    out = F.scaled_dot_product_attention(
        by_head, k, v, attn_mask=mask, is_causal=mask is None, scale=rules.scale, enable_gqa=True
    )
    return out[0, ..., : q.shape[2]].transpose(0, 1)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Another position whose value is zero and whose score is the sink: of all dimensions, its key has only a new last
    one, in which the queries of a head have the sink. sinks: as q but for its last two dimensions"""
    sink = (sinks / scale).to(q.dtype).expand(*q.shape[:-1], 1)
    k, v = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, 1, 0, 1))
    k[..., -1, -1] = 1.0
    return torch.cat((q, sink), dim=-1), k, v, F.pad(mask, (0, 1), value=True)
