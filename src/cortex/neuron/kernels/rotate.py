"""What happens to q, k and v between their projection and attention, in one pass: norms, rotation, store into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import has_kernels, jit, tl, triton
from cortex.neuron.kernels.norm import rms_norm_reference


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
    positions: Tensor,
    rope: Tensor,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
) -> Tensor:
    """Returns the rotated q; writes the rotated k, and v, into their slots of the pages.

    q: [tokens, heads, dim], k and v: [tokens, kv heads, dim], strided views allowed, each head dense.
    rope: [positions, rotated dims], cosines then sines. Dimensions past the rotated ones pass through.
    """
    if not has_kernels(q):
        return rotate_and_store_reference(
            q,
            k,
            v,
            q_scale=q_scale,
            k_scale=k_scale,
            eps=eps,
            positions=positions,
            rope=rope,
            slots=slots,
            key_pages=key_pages,
            value_pages=value_pages,
        )
    tokens, heads, dim = q.shape
    kv_heads, half = k.shape[1], rope.shape[1] // 2
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    _rotate_kernel[(tokens, heads + 2 * kv_heads)](
        q,
        k,
        v,
        out,
        q_scale if q_scale is not None else q,
        k_scale if k_scale is not None else k,
        positions,
        rope,
        slots,
        key_pages,
        value_pages,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        v.stride(0),
        heads,
        kv_heads,
        eps,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        NORM=q_scale is not None,
        num_warps=1,
    )
    return out


def rotate_and_store_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
    positions: Tensor,
    rope: Tensor,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
) -> Tensor:
    if q_scale is not None and k_scale is not None:
        q, k = rms_norm_reference(q, q_scale, eps), rms_norm_reference(k, k_scale, eps)
    cosine, sine = rope[positions].to(q.dtype)[:, None].chunk(2, dim=-1)
    key_pages.flatten(0, 1).index_copy_(0, slots, _rotate(k, cosine, sine))
    value_pages.flatten(0, 1).index_copy_(0, slots, v)
    return _rotate(q, cosine, sine)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x: [tokens, heads, dim]; cosine and sine: [tokens, 1, rotated dims / 2]"""
    half = cosine.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cosine, out=out[..., :half]).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=out[..., half : 2 * half]).addcmul_(first, sine)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


@jit
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
    heads,
    kv_heads,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program per token and head; heads beyond the q heads are k heads, then v heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK)
    inside = dim < DIM
    if head >= heads + kv_heads:
        kv_head = head - heads - kv_heads
        slot = tl.load(slots + token)
        value = tl.load(v + token * v_token_stride + kv_head * DIM + dim, mask=inside)
        tl.store(value_pages + (slot * kv_heads + kv_head) * DIM + dim, value, mask=inside)
    else:
        if head < heads:
            source = q + token * q_token_stride + head * q_head_stride
            target = out + (token * heads + head) * DIM
            scales = q_scale
        else:
            kv_head = head - heads
            slot = tl.load(slots + token)
            source = k + token * k_token_stride + kv_head * DIM
            target = key_pages + (slot * kv_heads + kv_head) * DIM
            scales = k_scale
        scale = 1.0
        if NORM:
            whole = tl.load(source + dim, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(whole * whole, 0) / DIM + eps)
        half = tl.arange(0, HALF_BLOCK)
        rotated = half < HALF
        first = tl.load(source + half, mask=rotated, other=0.0).to(tl.float32) * scale
        second = tl.load(source + HALF + half, mask=rotated, other=0.0).to(tl.float32) * scale
        if NORM:
            first *= tl.load(scales + half, mask=rotated, other=0.0).to(tl.float32)
            second *= tl.load(scales + HALF + half, mask=rotated, other=0.0).to(tl.float32)
        position = tl.load(positions + token)
        cosine = tl.load(rope + position * 2 * HALF + half, mask=rotated, other=0.0)
        sine = tl.load(rope + position * 2 * HALF + HALF + half, mask=rotated, other=0.0)
        tl.store(target + half, (first * cosine - second * sine).to(out.dtype.element_ty), mask=rotated)
        tl.store(target + HALF + half, (second * cosine + first * sine).to(out.dtype.element_ty), mask=rotated)
        if 2 * HALF < DIM:
            rest = inside & (dim >= 2 * HALF)
            kept = tl.load(source + dim, mask=rest, other=0.0).to(tl.float32) * scale
            if NORM:
                kept *= tl.load(scales + dim, mask=rest, other=0.0).to(tl.float32)
            tl.store(target + dim, kept.to(out.dtype.element_ty), mask=rest)
