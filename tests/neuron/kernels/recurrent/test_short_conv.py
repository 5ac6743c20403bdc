"""The gated short convolution's kernels against their reference."""

from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose
from tests.neuron.kernels.recurrent.batches import CUT_PREFILLS, FEW_TOKENS, as_decode_rows, make_batch, saved_slots

from cortex.neuron.kernels.recurrent.short_conv import short_conv, short_conv_reference


@pytest.mark.parametrize(("channels", "taps"), [(300, 3), (64, 4), (17, 2)])
@pytest.mark.parametrize(
    ("decode_positions", "prefills"),
    [([5, 0, 1, 1000], []), ([7], [(0, 2), (1, 1), (300, 133)]), ([], [(2, 65), (0, 1)])],
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_output_and_state_of_a_step_match_the_reference(
    channels: int,
    taps: int,
    decode_positions: list[int],
    prefills: list[tuple[int, int]],
    batch_invariant: bool,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    if batch_invariant:
        decode_positions, prefills = [], [(start, min(count, 3)) for start, count in prefills] or [(4, 1)]
    batch = make_batch(decode_positions, prefills, device)
    projected = torch.randn(len(batch.positions), 3 * channels, device=device, dtype=dtype)
    weight = torch.randn(taps, channels, device=device, dtype=dtype)
    recent = torch.randn(len(batch.rows) + 2, 3, taps, channels, device=device, dtype=dtype)[:, 1]
    exact = recent.clone()
    expected = short_conv_reference(projected, weight, batch, exact)
    out = short_conv(projected, weight, replace(batch, batch_invariant=batch_invariant), recent)
    assert_close(out, expected)
    assert torch.equal(recent, exact)


@pytest.mark.parametrize(("prefills", "cuts"), CUT_PREFILLS)
def test_state_at_a_cut_is_saved(
    prefills: list[tuple[int, int]],
    cuts: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    channels, taps = 40, 2 + len(prefills) % 3
    batch = make_batch([5] * (len(prefills) > 1), prefills, device, cuts)
    projected = torch.randn(len(batch.positions), 3 * channels, device=device, dtype=dtype)
    weight = torch.randn(taps, channels, device=device, dtype=dtype)
    slots = len(batch.rows) + len(saved_slots(batch)) + 2
    recent = torch.randn(slots, 3, taps, channels, device=device, dtype=dtype)[:, 1]
    exact = recent.clone()
    expected = short_conv_reference(projected, weight, batch, exact)
    assert_close(short_conv(projected, weight, batch, recent), expected)
    assert torch.equal(recent, exact)


@pytest.mark.parametrize("tokens", FEW_TOKENS)
def test_tokens_of_one_sequence_as_decode_rows_match_the_reference(
    tokens: list[tuple[int, int]], device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    channels, taps = (40, 3) if len(tokens) == 1 else (300, 4)
    batch = as_decode_rows(tokens, device)
    projected = torch.randn(len(batch.rows), 3 * channels, device=device, dtype=dtype)
    weight = torch.randn(taps, channels, device=device, dtype=dtype)
    recent = torch.randn(len(tokens) + 2, 3, taps, channels, device=device, dtype=dtype)[:, 1]
    exact = recent.clone()
    expected = short_conv_reference(projected, weight, batch, exact)
    assert_close(short_conv(projected, weight, batch, recent), expected)
    assert torch.equal(recent, exact)
