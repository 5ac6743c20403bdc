"""Norms and stores the latent of each token, and rotates its key and the rotated part of its queries, in one pass.

Reference: `attention.absorbed_reference`.
"""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.latent.rules import LatentRules


def store_latents(q: Tensor, latents: Tensor, rules: LatentRules, batch: Batch, pages: Tensor, query: Tensor) -> None:
    """Writes the slots of the batch in `pages`, and the rotated dimensions of `query` ([tokens, heads, latent + rope
    dims], contiguous). q and latents: see `latent_attention`."""
    tokens, heads, query_dim = q.shape
    half = rules.rope_dims // 2
    _store_latents_kernel[(tokens,)](
        q,
        latents,
        rules.k_scale,
        batch.positions,
        rules.rope,
        batch.slots,
        pages,
        query,
        q.stride(0),
        latents.stride(0),
        rules.eps,
        HEADS=heads,
        HEADS_BLOCK=triton.next_power_of_2(heads),
        QUERY_DIM=query_dim,
        LATENT=rules.latent,
        LATENT_BLOCK=triton.next_power_of_2(rules.latent),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        INTERLEAVED=rules.interleaved,
        num_warps=4,
        **launch_options(q.device),
    )


@jit
def _rotated(source, cosine, sine, inside, half, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves of rotated heads at `source`, float32."""
    if INTERLEAVED:
        low, high = source + 2 * half, source + 2 * half + 1
    else:
        low, high = source + half, source + half + HALF
    first = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(high, mask=inside, other=0.0).to(tl.float32)
    return first * cosine - second * sine, second * cosine + first * sine


@jit
def _store_latents_kernel(
    q,
    latents,
    norm_weight,
    positions,
    rope,
    slots,
    pages,
    query,
    q_stride,
    latents_stride,
    eps,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, LATENT_BLOCK)
    inside = column < LATENT
    gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    half = tl.arange(0, HALF_BLOCK)
    rope_row = rope + tl.load(positions + token) * 2 * HALF
    cosine = tl.load(rope_row + half, mask=half < HALF, other=0.0)
    sine = tl.load(rope_row + HALF + half, mask=half < HALF, other=0.0)
    slot = tl.load(slots + token) * (LATENT + 2 * HALF)
    if OVERLAP:
        gdc_wait()

    source = latents + token * latents_stride
    value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps) * gain
    kind = query.dtype.element_ty  # rounded as the queries are, then to what the pages hold
    tl.store(pages + slot + column, normed.to(kind).to(pages.dtype.element_ty), mask=inside)
    key = pages + slot + LATENT + half
    first, second = _rotated(source + LATENT, cosine, sine, half < HALF, half, HALF, INTERLEAVED)
    tl.store(key, first.to(kind).to(pages.dtype.element_ty), mask=half < HALF)
    tl.store(key + HALF, second.to(kind).to(pages.dtype.element_ty), mask=half < HALF)

    head = tl.arange(0, HEADS_BLOCK)
    is_query = (head < HEADS)[:, None] & (half < HALF)[None, :]
    source = q + token * q_stride + head[:, None] * QUERY_DIM + QUERY_DIM - 2 * HALF
    first, second = _rotated(source, cosine[None, :], sine[None, :], is_query, half[None, :], HALF, INTERLEAVED)
    target = query + (token * HEADS + head[:, None]) * (LATENT + 2 * HALF) + LATENT + half[None, :]
    tl.store(target, first.to(kind), mask=is_query)
    tl.store(target + HALF, second.to(kind), mask=is_query)
