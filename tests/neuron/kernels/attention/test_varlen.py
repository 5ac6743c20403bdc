"""Attention within texts of different lengths, against one text at a time with an explicit mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cortex.neuron.kernels.attention import varlen
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.layers.configs import RopeConfig
from cortex.neuron.layers.rope import rope_table
from cortex.neuron.private_api.torch import flash_attention

LENGTHS = (3, 3, 1, 17, 9, 9, 9)
HEADS, KV_HEADS, DIM = 4, 2, 16


def batch_of(lengths: tuple[int, ...], device: str = "cpu") -> Batch:
    offsets = [0, *itertools.accumulate(lengths)]
    empty = torch.empty(0, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    rows = tuple(
        PrefillRow(row, 0, count, offset) for row, (count, offset) in enumerate(zip(lengths, offsets, strict=False))
    )
    return Batch(
        tokens=positions,
        positions=positions,
        slots=empty,
        rows=empty,
        lengths=empty,
        page_table=empty,
        num_decodes=0,
        max_length=max(lengths),
        prefills=rows,
        prefill_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        has_pages=False,
    )


def rules_of(device: str = "cpu", **changes: object) -> AttentionRules:
    table = rope_table(RopeConfig(DIM), 32, torch.device(device))
    return AttentionRules(scale=0.3, rope=table, **changes)  # type: ignore[arg-type]


def one_text(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
    """q, k and v are rotated: [tokens, heads, dim]"""
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * rules.scale
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if rules.is_causal:
        hidden |= distance < 0
    if rules.window is not None:
        hidden |= distance.abs() >= rules.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def rotated(x: Tensor, rules: AttentionRules, positions: Tensor) -> Tensor:
    cosine, sine = rules.rope[positions][:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rotates", [True, False])
def test_each_text_attends_to_itself_only(window: int | None, is_causal: bool, rotates: bool) -> None:
    torch.manual_seed(0)
    batch, rules = batch_of(LENGTHS), rules_of(window=window, is_causal=is_causal, rotates=rotates)
    q, k, v = (torch.randn(sum(LENGTHS), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = varlen.varlen_attention(q, k, v, rules, batch)
    for row in batch.prefills:
        part = slice(row.offset, row.offset + row.count)
        turned = [rotated(each, rules, batch.positions) if rotates else each for each in (q, k)]
        expected = one_text(turned[0][part], turned[1][part], v[part], rules)
        assert torch.allclose(found[part], expected, atol=1e-5)


def test_queries_and_keys_are_normalised_before_they_are_rotated() -> None:
    torch.manual_seed(1)
    weight = torch.rand(DIM) + 0.5
    batch, plain = batch_of(LENGTHS), rules_of()
    q, k, v = (torch.randn(sum(LENGTHS), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = varlen.varlen_attention(q, k, v, rules_of(q_scale=weight, k_scale=weight, eps=1e-6), batch)
    q, k = (each * torch.rsqrt(each.square().mean(-1, keepdim=True) + 1e-6) * weight for each in (q, k))
    assert torch.allclose(found, varlen.varlen_attention(q, k, v, plain, batch), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_flash_attention_matches_the_reference(window: int | None, is_causal: bool) -> None:
    torch.manual_seed(0)
    batch, rules = batch_of(LENGTHS, "cuda"), rules_of("cuda", window=window, is_causal=is_causal)
    q, k, v = (
        torch.randn(sum(LENGTHS), heads, DIM, dtype=torch.bfloat16, device="cuda")
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    offsets, length = batch.prefill_offsets, batch.max_length
    found = flash_attention(q, k, v, offsets, length, scale=rules.scale, causal=is_causal, window=window)
    expected = varlen.varlen_attention_reference(q, k, v, rules, batch)
    assert torch.allclose(found, expected, atol=2e-2)
