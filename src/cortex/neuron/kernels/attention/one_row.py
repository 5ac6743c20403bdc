"""Attention of a single token on a CPU. Uses few operations: at this size, each has a fixed cost that exceeds its work.

Reference: `paged.attention_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.attention.rotate import Rotation, normed_values
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class OneRow:
    """Values shared by all layers of a one-token step."""

    rotation: Rotation
    matrix: Tensor | None
    """[dim, dim]: the rotation as a product, which is fastest in float32"""
    slot: int
    """The first element of the token's key and value in the pages."""
    first: int | None
    """The first element that the token attends to in the pages; None: its pages do not lie side by side, in order."""
    positions: Tensor
    """[positions that the token attends to] int64: their slots, if `first` is None; else empty"""
    length: int

    @classmethod
    def of(cls, batch: Batch, rules: AttentionRules, pages: Tensor, dtype: torch.dtype) -> OneRow:
        _, page_tokens, kv_heads, dim = pages.shape
        length = int(batch.lengths[0])
        begin = 0 if rules.window is None else max(0, length - rules.window)
        table = batch.page_table[batch.rows[0], : -(-length // page_tokens)]
        listed = table[begin // page_tokens :].tolist()
        is_run = listed == list(range(listed[0], listed[0] + len(listed)))
        size = kv_heads * dim
        positions = torch.arange(begin, begin if is_run else length)
        return cls(
            rotation=(rotation := Rotation.at(batch.rope_positions, rules.rope, dtype, rules.half)),
            matrix=rotation.matrix(dim) if dtype == torch.float32 else None,
            slot=int(batch.slots[0]) * size,
            first=(listed[0] * page_tokens + begin % page_tokens) * size if is_run else None,
            positions=table[positions // page_tokens].long() * page_tokens + positions % page_tokens,
            length=length - begin,
        )

    def rotated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [1, heads, dim] → [heads, dim]"""
        if self.matrix is not None:
            return torch.mm(x[0], self.matrix, out=out)
        rotated = self.rotation(x)[0]
        return rotated if out is None else out.copy_(rotated)

    def own(self, pages: Tensor) -> Tensor:
        """[kv heads, dim]: where the pages have the token's own key or value."""
        _, _, kv_heads, dim = pages.shape
        return pages.as_strided((kv_heads, dim), (dim, 1), pages.storage_offset() + self.slot)

    def visible(self, pages: Tensor) -> Tensor:
        """[1, kv heads, length, dim]: the positions that the token attends to, without a copy if that is possible."""
        _, _, kv_heads, dim = pages.shape
        if self.first is None:
            return pages.view(-1, kv_heads, dim).index_select(0, self.positions).transpose(0, 1)[None]
        size, stride = (1, kv_heads, self.length, dim), (0, dim, kv_heads * dim, 1)
        return pages.as_strided(size, stride, pages.storage_offset() + self.first)


def one_row_attention(
    q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor
) -> Tensor:
    """As `attention`, for a batch of one decode row whose pages have the dtype of q."""
    _, heads, dim = q.shape
    shape = key_pages.shape
    key = ("one row", id(rules.rope), rules.window, shape, q.dtype)
    row = batch.once(key, lambda: OneRow.of(batch, rules, key_pages, q.dtype))
    if rules.q_scale is not None and rules.k_scale is not None:
        q, k = rms_norm(q, rules.q_scale, rules.eps), rms_norm(k, rules.k_scale, rules.eps)
    row.rotated(k, out=row.own(key_pages))
    row.own(value_pages).copy_(normed_values(v, rules)[0])
    grouped = row.rotated(q).view(1, shape[2], -1, dim)  # query heads are grouped by the kv head they share
    out = F.scaled_dot_product_attention(grouped, row.visible(key_pages), row.visible(value_pages), scale=rules.scale)
    return out.view(1, heads, dim)
