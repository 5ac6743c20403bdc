"""Norms and rotates q and k of prefill tokens, and stores k and v in the pages, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.norm import rms_norm_reference

HEADS_AT_ONCE = 16
"""Heads of one program."""
FLOAT8_MAX = 448.0
"""The largest value in float8_e4m3fn."""


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: AttentionRules,
    positions: Tensor,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
) -> Tensor:
    """Returns the rotated q. Writes the rotated k, and v, to their slots in the pages.

    q: [tokens, heads, dim], k and v: [tokens, kv heads, dim], strided views allowed, each head dense.
    """
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    parts = triton.cdiv(heads, HEADS_AT_ONCE) + triton.cdiv(k.shape[1], HEADS_AT_ONCE)
    _rotate_kernel[(tokens, parts)](
        q,
        k,
        v,
        out,
        rules.q_scale,
        rules.k_scale,
        positions,
        rules.rope,
        slots,
        key_pages,
        value_pages,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        v.stride(0),
        rules.eps,
        HEADS=heads,
        KV_HEADS=k.shape[1],
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        HALF=rules.half,
        PAIRS=rules.rope.shape[1] // 2,
        AT_ONCE=HEADS_AT_ONCE,
        NORM=rules.q_scale is not None,
        NORM_VALUES=rules.norms_values,
        num_warps=4,
        **launch_options(q.device),
    )
    return out


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines for the tokens of a step: the same in all layers that share a table."""

    cosines: Tensor
    """[tokens, 1, rotated dims]"""
    sines: Tensor
    """[tokens, 1, rotated dims]: negated in the first half, where the second half is subtracted"""

    @classmethod
    def at(cls, positions: Tensor, rope: Tensor, dtype: torch.dtype, half: int = 0) -> Rotation:
        """`half`: see `AttentionRules`; pairs that the table does not have do not turn."""
        cosine, sine = rope[positions].to(dtype)[:, None].chunk(2, dim=-1)
        if (missing := half - cosine.shape[-1]) > 0:
            cosine, sine = F.pad(cosine, (0, missing), value=1.0), F.pad(sine, (0, missing))
        return cls(torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, dim] → the same, rotated. Uses few operations: on a CPU each one has a fixed cost."""
        dims = self.cosines.shape[-1]
        if dims < x.shape[-1]:
            return torch.cat((self(x[..., :dims]), x[..., dims:]), dim=-1)
        return (x * self.cosines).addcmul_(x.roll(dims // 2, -1), self.sines)

    def matrix(self, dim: int) -> Tensor:
        """[dim, dim]: the rotation of a single token, as a matrix that its heads are multiplied by."""
        return self(torch.eye(dim, dtype=self.cosines.dtype)[None])[0]


def rotate_and_store_by(
    rotation: Rotation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: AttentionRules,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
) -> Tensor:
    """The reference of `rotate_and_store`, with a precomputed rotation."""
    if rules.q_scale is not None and rules.k_scale is not None:
        q = rms_norm_reference(q, rules.q_scale, rules.eps)
        k = rms_norm_reference(k, rules.k_scale, rules.eps)
    store(key_pages, slots, rotation(k))
    store(value_pages, slots, normed_values(v, rules))
    return rotation(q)


def normed_values(v: Tensor, rules: AttentionRules) -> Tensor:
    """v: [tokens, kv heads, dim], normalised if the rules say so"""
    return rms_norm_reference(v, v.new_ones(()), rules.eps) if rules.norms_values else v


def store(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """values: [tokens, kv heads, dim]"""
    if pages.dtype == torch.float8_e4m3fn:  # larger values become the largest, as in the kernels
        values = values.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(pages.dtype).view(torch.uint8)
        pages = pages.view(torch.uint8)
    pages.flatten(0, 1).index_copy_(0, slots, values)


@jit
def rotation_factors(
    scales,
    rope_row,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    NORM: tl.constexpr,
):
    """The factors of a head's elements and of their partners that scale and rotate them: two of [dim] float32."""
    dim = tl.arange(0, DIM_BLOCK)
    pair = tl.where(dim < HALF, dim, dim - HALF)
    is_rotated = (dim < 2 * HALF) & (pair < PAIRS)
    own = tl.load(rope_row + pair, mask=is_rotated, other=1.0)
    sine = tl.load(rope_row + PAIRS + pair, mask=is_rotated, other=0.0)
    partner = tl.where(dim < HALF, -sine, sine)
    if NORM:
        own *= tl.load(scales + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        partner *= tl.load(scales + _partner(dim, HALF), mask=dim < DIM, other=0.0).to(tl.float32)
    return own, partner


@jit
def _partner(dim, HALF: tl.constexpr):
    return tl.where(dim < 2 * HALF, tl.where(dim < HALF, dim + HALF, dim - HALF), dim)


@jit
def rotated_heads(
    source,
    head,
    head_stride,
    num_heads,
    factors,
    eps,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """[heads, dim] float32: the heads `head` of one token at `source`, normed and rotated; zero beyond `num_heads`."""
    own, partner = factors
    dim = tl.arange(0, DIM_BLOCK)
    inside = (head < num_heads)[:, None] & (dim < DIM)[None, :]
    line = source + head[:, None] * head_stride
    value = tl.load(line + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line + _partner(dim, HALF)[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = value * own[None, :] + other * partner[None, :]
    if NORM:
        rotated *= tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
    return rotated


# Slices after the decode rows have any alignment: do not compile a variant for each.
@jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_kernel(
    q,
    k,
    v,
    out,
    q_scale,
    k_scale,
    positions,
    rope,
    slots,
    key_pages,
    value_pages,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    v_token_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some query heads of one token, or some of its keys and values."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    rope_row = rope + tl.load(positions + token) * 2 * PAIRS
    slot = tl.load(slots + token) * KV_HEADS * DIM
    q_factors = rotation_factors(q_scale, rope_row, DIM, DIM_BLOCK, HALF, PAIRS, NORM)
    k_factors = rotation_factors(k_scale, rope_row, DIM, DIM_BLOCK, HALF, PAIRS, NORM)
    if OVERLAP:
        gdc_wait()
    QUERY_PARTS: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    if part < QUERY_PARTS:
        _rotate_queries(
            q, out, token, part * AT_ONCE, q_token_stride, q_head_stride, q_factors, eps, HEADS, DIM, DIM_BLOCK, HALF,
            AT_ONCE, NORM,
        )  # fmt: skip
    else:
        _store_keys(
            k, v, key_pages, value_pages, token, slot, (part - QUERY_PARTS) * AT_ONCE, k_token_stride, v_token_stride,
            k_factors, eps, out.dtype.element_ty, KV_HEADS, DIM, DIM_BLOCK, HALF, AT_ONCE, NORM, NORM_VALUES,
        )  # fmt: skip


@jit
def _rotate_queries(q, out, token, first, token_stride, head_stride, factors, eps, HEADS: tl.constexpr,
                    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, HALF: tl.constexpr, AT_ONCE: tl.constexpr,
                    NORM: tl.constexpr):  # fmt: skip
    """Heads of one token from `first` on."""
    head = first + tl.arange(0, AT_ONCE)
    dim = tl.arange(0, DIM_BLOCK)
    inside = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    y = rotated_heads(q + token * token_stride, head, head_stride, HEADS, factors, eps, DIM, DIM_BLOCK, HALF, NORM)
    where = (token * HEADS + head[:, None]) * DIM + dim[None, :]
    tl.store(out + where, y.to(out.dtype.element_ty), mask=inside)


@jit
def _store_keys(k, v, key_pages, value_pages, token, slot, first, k_token_stride, v_token_stride, factors, eps,
                KIND: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
                HALF: tl.constexpr, AT_ONCE: tl.constexpr, NORM: tl.constexpr, NORM_VALUES: tl.constexpr):  # fmt: skip
    """Keys and values of one token from the kv head `first` on. KIND: they are rounded as the queries are, then to what
    the pages hold."""
    head = first + tl.arange(0, AT_ONCE)
    dim = tl.arange(0, DIM_BLOCK)
    inside = (head < KV_HEADS)[:, None] & (dim < DIM)[None, :]
    y = rotated_heads(k + token * k_token_stride, head, DIM, KV_HEADS, factors, eps, DIM, DIM_BLOCK, HALF, NORM)
    where = slot + head[:, None] * DIM + dim[None, :]
    tl.store(key_pages + where, y.to(KIND).to(key_pages.dtype.element_ty), mask=inside)
    value = tl.load(v + token * v_token_stride + head[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    if NORM_VALUES:
        exact = value.to(tl.float32)
        exact *= tl.rsqrt(tl.sum(exact * exact, 1) / DIM + eps)[:, None]
        value = exact.to(KIND)
    tl.store(value_pages + where, value.to(value_pages.dtype.element_ty), mask=inside)
