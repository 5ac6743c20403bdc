"""The gated delta net's kernels against their references."""

import dataclasses

import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose
from tests.neuron.kernels.recurrent.batches import CUT_PREFILLS, FEW_TOKENS, as_decode_rows, make_batch, saved_slots

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.delta.gated_delta import gated_delta, gated_delta_reference
from cortex.neuron.kernels.delta.rules import DeltaRules, DeltaState
from cortex.neuron.kernels.delta.step import num_columns


def make_rules(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> DeltaRules:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return DeltaRules(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_weight=torch.randn(taps, channels, device=device, dtype=dtype),
        decay_rate=torch.rand(value_heads, device=device),
        decay_bias=torch.randn(value_heads, device=device),
        norm_weight=torch.rand(value_dim, device=device, dtype=dtype) + 0.5,
        eps=1e-6,
    )


def in_float32(rules: DeltaRules) -> DeltaRules:
    return dataclasses.replace(rules, conv_weight=rules.conv_weight.float(), norm_weight=rules.norm_weight.float())


def make_state(rules: DeltaRules, slots: int, layers: int, device: torch.device, dtype: torch.dtype) -> DeltaState:
    """The view of one layer into states that interleave layers."""
    recent = torch.randn(slots, layers, *rules.conv_weight.shape, device=device, dtype=dtype)
    memory = torch.randn(slots, layers, rules.value_heads, rules.key_dim, rules.value_dim, device=device)
    return DeltaState(recent[:, 1], memory[:, 1])


def compare(
    rules: DeltaRules,
    batch: Batch,
    projected: torch.Tensor,
    assert_close: AssertClose,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    written = [*batch.rows.tolist(), *saved_slots(batch)]
    state = make_state(rules, len(written) + 2, 3, device, dtype)
    exact_state = DeltaState(state.recent.to(torch.float32, copy=True), state.memory.clone())
    untouched = sorted(set(range(len(state.memory))) - set(written))
    before = state.memory[untouched].clone(), state.recent[untouched].clone()
    out = gated_delta(projected, rules, batch, state)
    expected = gated_delta_reference(projected.float(), in_float32(rules), batch, exact_state)
    assert_close(out, expected)
    assert_close(state.memory[written], exact_state.memory[written])
    assert torch.equal(state.recent.float(), exact_state.recent)
    assert torch.equal(state.memory[untouched], before[0])
    assert torch.equal(state.recent[untouched], before[1])


SIZES = [(2, 4, 32, 32, 4), (1, 3, 24, 40, 4), (2, 2, 16, 64, 2)]


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim", "taps", "decode_positions", "prefills"),
    [(*sizes, [5, 0, 2, 3, 1000], []) for sizes in SIZES]
    + [(*sizes, [7], [(0, 2), (63, 64), (300, 129)]) for sizes in SIZES]
    + [(*SIZES[1], [0], []), (*SIZES[1], [], [(0, 64), (1, 3), (2, 65)])],
)
def test_output_and_state_of_a_step_match_the_reference(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    decode_positions: list[int],
    prefills: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    batch = make_batch(decode_positions, prefills, device)
    rules = make_rules(key_heads, value_heads, key_dim, value_dim, taps, device, dtype)
    projected = torch.randn(len(batch.positions), rules.projected_size, device=device, dtype=dtype)
    compare(rules, batch, projected, assert_close, device, dtype)


@pytest.mark.parametrize(("prefills", "cuts"), CUT_PREFILLS)
def test_state_at_a_cut_is_saved(
    prefills: list[tuple[int, int]],
    cuts: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    batch = make_batch([5] * (len(prefills) > 1), prefills, device, cuts)
    rules = make_rules(*SIZES[len(prefills) % len(SIZES)], device, dtype)
    projected = torch.randn(len(batch.positions), rules.projected_size, device=device, dtype=dtype)
    compare(rules, batch, projected, assert_close, device, dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tokens", FEW_TOKENS[1:])
def test_tokens_of_one_sequence_as_decode_rows_match_the_reference(
    sizes: tuple[int, int, int, int, int],
    tokens: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    batch = as_decode_rows(tokens, device)
    rules = make_rules(*sizes, device, dtype)
    projected = torch.randn(len(batch.rows), rules.projected_size, device=device, dtype=dtype)
    compare(rules, batch, projected, assert_close, device, dtype)


def test_prompt_of_one_repeated_token_matches_the_reference(
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    """Equal keys and almost no decay: the worst case of the triangular systems.

    The query equals the key. Any other query would read almost nothing from the memory, and the norm would amplify the
    rounding errors; plain torch in bfloat16 is no more accurate there than the kernel.
    """
    batch = make_batch([], [(0, 200)], device)
    rules = make_rules(1, 2, 16, 16, 4, device, dtype)
    rules = dataclasses.replace(rules, decay_bias=torch.full((2,), -30.0, device=device))
    token = torch.randn(rules.projected_size, device=device, dtype=dtype)
    query, key = slice(rules.key_size), slice(rules.key_size, 2 * rules.key_size)
    token[query] = token[key]
    rules.conv_weight[:, query] = rules.conv_weight[:, key]
    token[rules.channels + rules.value_size :] = 9.0  # write with full strength
    token[-2:] = 0.0
    compare(rules, batch, token.repeat(200, 1), assert_close, device, dtype)


@pytest.mark.parametrize(
    ("heads", "value_block", "processors", "columns"),
    [
        (32, 128, 132, 32),
        (128, 128, 132, 32),
        (256, 128, 132, 128),
        (32, 128, 0, 128),  # the same for any batch
        (4, 16, 132, 16),
        (1 << 17, 128, 1 << 20, 128),
    ],
)
def test_programs_of_a_step_divide_the_columns_of_heads(
    heads: int, value_block: int, processors: int, columns: int
) -> None:
    assert num_columns(heads, value_block, processors) == columns


@pytest.mark.gpu
def test_every_replay_of_a_captured_step_advances_the_state(
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    rules = make_rules(2, 4, 128, 128, 4, device, dtype)
    batch = make_batch([3, 9], [], device)
    state = make_state(rules, 4, 3, device, dtype)
    exact = DeltaState(state.recent.to(torch.float32, copy=True), state.memory.clone())
    projected = torch.randn(2, rules.projected_size, device=device, dtype=dtype)
    kept = state.recent.clone(), state.memory.clone()
    gated_delta(projected, rules, batch, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_delta(projected, rules, batch, state)
    state.recent.copy_(kept[0])
    state.memory.copy_(kept[1])
    for _ in range(3):
        graph.replay()
        expected = gated_delta_reference(projected.float(), in_float32(rules), batch, exact)
        batch.positions.add_(1)
    assert_close(out, expected)
    assert_close(state.memory[batch.rows], exact.memory[batch.rows])
