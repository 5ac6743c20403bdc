"""The gated delta rule in torch: chunked equals recurrent, for any split of a sequence into steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.kernels.delta.gated_delta import delta_chunked, delta_recurrent, gated_delta_reference
from cortex.neuron.kernels.delta.rules import DeltaRules, DeltaState


def make_rules(
    key_heads: int = 2, value_heads: int = 4, key_dim: int = 8, value_dim: int = 6, taps: int = 4
) -> DeltaRules:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return DeltaRules(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_weight=torch.randn(taps, channels),
        decay_rate=torch.rand(value_heads) * 4,
        decay_bias=torch.randn(value_heads),
        norm_weight=torch.rand(value_dim) + 0.5,
        eps=1e-6,
    )


def garbage_state(rules: DeltaRules, slots: int) -> DeltaState:
    """Slots filled with NaN: the old contents of a slot must not matter."""
    taps, channels = rules.conv_weight.shape
    recent = torch.full((slots, taps, channels), torch.nan)
    return DeltaState(recent, torch.full((slots, rules.value_heads, rules.key_dim, rules.value_dim), torch.nan))


def step(rules: DeltaRules, state: DeltaState, pieces: list[tuple[int, int, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """One step of `pieces`: (row, first position, projected tokens), singles first."""
    decodes = sum(len(tokens) == 1 for _, _, tokens in pieces)
    offset, prefills = decodes, []
    for row, start, tokens in pieces[decodes:]:
        prefills.append(PrefillRow(row, start, len(tokens), offset))
        offset += len(tokens)
    batch = Batch(
        tokens=torch.empty(0),
        positions=torch.cat([torch.arange(start, start + len(tokens)) for _, start, tokens in pieces]),
        slots=torch.empty(0),
        rows=torch.tensor([row for row, _, _ in pieces]),
        lengths=torch.tensor([start + len(tokens) for _, start, tokens in pieces]),
        page_table=torch.empty(0),
        num_decodes=decodes,
        max_length=0,
        prefills=tuple(prefills),
    )
    out = gated_delta_reference(torch.cat([tokens for _, _, tokens in pieces]), rules, batch, state)
    split: tuple[torch.Tensor, ...] = out.split([len(tokens) for _, _, tokens in pieces])
    return split


def assert_same(*inputs: torch.Tensor) -> None:
    *_, memory = inputs
    chunked, chunked_memory = delta_chunked(*inputs)
    recurrent = delta_recurrent(*inputs)  # updates the memory in place
    torch.testing.assert_close(chunked, recurrent, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(chunked_memory, memory, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("decay", [0.0, 0.1, 30.0])
def test_chunked_equals_recurrent(tokens: int, decay: float) -> None:
    torch.manual_seed(tokens)
    q, k = torch.nn.functional.normalize(torch.randn(2, 3, tokens, 16), dim=-1)
    v, memory = torch.randn(3, tokens, 10), torch.randn(3, 16, 10)
    assert_same(q, k, v, -decay * torch.rand(3, tokens), torch.rand(3, tokens), memory)


def test_chunked_equals_recurrent_when_all_tokens_are_equal() -> None:
    """Equal keys with full write strength and no decay: the worst case of the triangular system."""
    key = torch.nn.functional.normalize(torch.ones(1, 128, 16), dim=-1)
    assert_same(key, key, torch.randn(1, 128, 4), torch.zeros(1, 128), torch.ones(1, 128), torch.zeros(1, 16, 4))


@given(
    cuts=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=6), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    taps=st.sampled_from([2, 4]),
)
def test_any_split_into_steps_beside_other_rows_equals_the_whole_sequence(
    cuts: list[list[int]], seed: int, taps: int
) -> None:
    torch.manual_seed(seed)
    rules = make_rules(taps=taps)
    sequences = [torch.randn(sum(parts), rules.projected_size) for parts in cuts]
    whole_state, state = (garbage_state(rules, len(cuts)) for _ in range(2))
    whole = [step(rules, whole_state, [(row, 0, tokens)])[0] for row, tokens in enumerate(sequences)]
    outputs: list[list[torch.Tensor]] = [[] for _ in cuts]
    done = [0] * len(cuts)
    for turn in range(max(map(len, cuts))):
        pieces = [
            (row, done[row], sequences[row][done[row] : done[row] + parts[turn]])
            for row, parts in enumerate(cuts)
            if turn < len(parts)
        ]
        pieces.sort(key=lambda piece: len(piece[2]) > 1)
        for (row, _, tokens), out in zip(pieces, step(rules, state, pieces), strict=True):
            outputs[row].append(out)
            done[row] += len(tokens)
    for row, tokens in enumerate(sequences):
        torch.testing.assert_close(torch.cat(outputs[row]), whole[row], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state.memory[row], whole_state.memory[row], atol=1e-4, rtol=1e-4)
        kept = torch.arange(max(0, len(tokens) - taps), len(tokens)) % taps
        torch.testing.assert_close(state.recent[row, kept], whole_state.recent[row, kept], atol=0, rtol=0)
