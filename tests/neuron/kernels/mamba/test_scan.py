"""Mamba-2's kernels against their references."""

from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose
from tests.neuron.kernels.recurrent.batches import CUT_PREFILLS, FEW_TOKENS, as_decode_rows, make_batch, saved_slots

from cortex.neuron.kernels.mamba.norm import group_norm, group_norm_reference
from cortex.neuron.kernels.mamba.rules import MambaRules, MambaState
from cortex.neuron.kernels.mamba.scan import mamba, mamba_reference

SIZES = [(4, 32, 2, 32, 4), (3, 24, 1, 40, 4), (2, 64, 2, 16, 2)]
"""Heads, head dim, groups, state dim, taps."""


def make_rules(
    heads: int, head_dim: int, groups: int, state_dim: int, taps: int, device: torch.device, dtype: torch.dtype
) -> MambaRules:
    channels = heads * head_dim + 2 * groups * state_dim
    return MambaRules(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=state_dim,
        conv_weight=torch.randn(taps, channels, device=device, dtype=dtype),
        conv_bias=torch.randn(channels, device=device) if taps > 2 else None,
        decay_rate=torch.rand(heads, device=device),
        step_bias=torch.randn(heads, device=device),
        skip=torch.randn(heads, device=device),
    )


@pytest.mark.parametrize(
    ("sizes", "decode_positions", "prefills", "batch_invariant"),
    [(sizes, [5, 0, 2, 3, 1000], [], False) for sizes in SIZES]
    + [(sizes, [7], [(0, 2), (63, 64), (300, 129)], False) for sizes in SIZES]
    + [(SIZES[1], [0], [], False), (SIZES[1], [], [(0, 64), (1, 3), (2, 65)], False)]
    + [(SIZES[0], [], [(0, 3), (5, 2), (1, 1)], True)],
)
def test_output_and_state_of_a_step_match_the_reference(
    sizes: tuple[int, int, int, int, int],
    decode_positions: list[int],
    prefills: list[tuple[int, int]],
    batch_invariant: bool,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    rules = make_rules(*sizes, device, dtype)
    batch = make_batch(decode_positions, prefills, device)
    width = rules.inner + rules.channels + rules.heads
    projected = torch.randn(len(batch.positions), width, device=device, dtype=dtype)
    slots = len(batch.rows) + 2
    recent = torch.randn(slots, 3, *rules.conv_weight.shape, device=device, dtype=dtype)[:, 1]
    memory = torch.randn(slots, 3, rules.heads, rules.state_dim, rules.head_dim, device=device)[:, 1]
    exact = MambaState(recent.to(torch.float32, copy=True), memory.clone())
    expected = mamba_reference(projected.float(), replace(rules, conv_weight=rules.conv_weight.float()), batch, exact)
    out = mamba(projected, rules, replace(batch, batch_invariant=batch_invariant), MambaState(recent, memory))
    assert_close(out, expected)
    assert_close(memory, exact.memory)
    assert torch.equal(recent.float(), exact.recent)


@pytest.mark.parametrize(("prefills", "cuts"), CUT_PREFILLS)
def test_state_at_a_cut_is_saved(
    prefills: list[tuple[int, int]],
    cuts: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    rules = make_rules(*SIZES[len(prefills) % len(SIZES)], device, dtype)
    batch = make_batch([5] * (len(prefills) > 1), prefills, device, cuts)
    width = rules.inner + rules.channels + rules.heads
    projected = torch.randn(len(batch.positions), width, device=device, dtype=dtype)
    slots = len(batch.rows) + len(saved_slots(batch)) + 2
    recent = torch.randn(slots, 3, *rules.conv_weight.shape, device=device, dtype=dtype)[:, 1]
    memory = torch.randn(slots, 3, rules.heads, rules.state_dim, rules.head_dim, device=device)[:, 1]
    exact = MambaState(recent.to(torch.float32, copy=True), memory.clone())
    expected = mamba_reference(projected.float(), replace(rules, conv_weight=rules.conv_weight.float()), batch, exact)
    assert_close(mamba(projected, rules, batch, MambaState(recent, memory)), expected)
    assert_close(memory, exact.memory)
    assert torch.equal(recent.float(), exact.recent)


@pytest.mark.parametrize("tokens", FEW_TOKENS)
def test_tokens_of_one_sequence_as_decode_rows_match_the_reference(
    tokens: list[tuple[int, int]], device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    rules = make_rules(*SIZES[len(tokens) % len(SIZES)], device, dtype)
    batch = as_decode_rows(tokens, device)
    projected = torch.randn(len(batch.rows), rules.inner + rules.channels + rules.heads, device=device, dtype=dtype)
    slots = len(tokens) + 2
    recent = torch.randn(slots, 3, *rules.conv_weight.shape, device=device, dtype=dtype)[:, 1]
    memory = torch.randn(slots, 3, rules.heads, rules.state_dim, rules.head_dim, device=device)[:, 1]
    exact = MambaState(recent.to(torch.float32, copy=True), memory.clone())
    expected = mamba_reference(projected.float(), replace(rules, conv_weight=rules.conv_weight.float()), batch, exact)
    assert_close(mamba(projected, rules, batch, MambaState(recent, memory)), expected)
    assert_close(memory, exact.memory)
    assert torch.equal(recent.float(), exact.recent)


@pytest.mark.parametrize(("values", "size"), [(48, 24), (130, 130), (3000, 3000)])
def test_norm_matches_the_reference(
    values: int, size: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x = torch.randn(5, values, device=device)
    weight = torch.randn(values, device=device, dtype=dtype)
    expected = group_norm_reference(x, weight.float(), size, 1e-5, torch.float32)
    assert_close(group_norm(x, weight, size, 1e-5, dtype), expected)
