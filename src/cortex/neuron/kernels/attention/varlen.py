"""Attention within whole texts of different lengths, which are concatenated: no pages, nothing is kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.attention.rotate import Rotation
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.attention.turn import turned
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.norm import rms_norm
from cortex.neuron.private_api.torch import flash_attention, has_flash_attention

_MAX_FLASH_DIM = 256
_FLASH_DIM_STEP = 8


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, batch: Batch) -> Tensor:
    """q: [tokens, heads, dim], k and v: [tokens, kv heads, dim] → [tokens, heads, dim].

    Norms and rotates q and k, and lets each token attend to those of its text, as `rules` say.
    """
    q, k = _rotated(q, k, rules, batch)
    if _has_flash(q):
        offsets, scale, window = batch.prefill_offsets, rules.scale, rules.window
        return flash_attention(q, k, v, offsets, batch.max_length, scale=scale, causal=rules.is_causal, window=window)
    return varlen_attention_reference(q, k, v, rules, batch)


def _rotated(q: Tensor, k: Tensor, rules: AttentionRules, batch: Batch) -> tuple[Tensor, Tensor]:
    if rules.q_scale is not None and rules.k_scale is not None:
        q, k = rms_norm(q, rules.q_scale, rules.eps), rms_norm(k, rules.k_scale, rules.eps)
    if not rules.rotates:
        return q, k
    key = ("rotation", id(rules.rope), q.dtype, rules.half)
    rotation = batch.once(key, lambda: Rotation.at(batch.positions, rules.rope, q.dtype, rules.half))
    return turned(q, rotation), turned(k, rotation)


def _has_flash(q: Tensor) -> bool:
    dim = q.shape[-1]
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    is_taken = q.is_cuda and is_half and dim <= _MAX_FLASH_DIM and dim % _FLASH_DIM_STEP == 0
    return is_taken and has_flash_attention(q)


def varlen_attention_reference(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, batch: Batch) -> Tensor:
    """The same for rotated q and k, for every device and dtype. Neighbours of equal length are computed together."""
    parts, first = [], 0
    rows = batch.prefills
    while first < len(rows):
        last = first
        while last + 1 < len(rows) and rows[last + 1].count == rows[first].count:
            last += 1
        start, num_texts, length = rows[first].offset, last + 1 - first, rows[first].count
        query, key, value = (
            each[start : start + num_texts * length].unflatten(0, (num_texts, length)).transpose(1, 2)
            for each in (q, k, v)
        )
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_window_mask(length, rules, q.device),
            is_causal=rules.is_causal and (rules.window is None or rules.window >= length),
            scale=rules.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
        first = last + 1
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _window_mask(length: int, rules: AttentionRules, device: torch.device) -> Tensor | None:
    """[length, length] bool, or None if the window hides nothing."""
    if rules.window is None or rules.window >= length:
        return None
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    is_near = distance.abs() < rules.window
    return is_near & (distance >= 0) if rules.is_causal else is_near
