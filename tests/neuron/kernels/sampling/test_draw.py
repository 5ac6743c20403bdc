"""Draws by the kernels, compared with the reference: every option alone and in pairs, ties, infinities, few tokens."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.neuron.kernels.conftest import combinations
from torch import Tensor

from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.engine.sampling.sampler import Draw, Drawn, GrammarMask, Sampler, draw_lines
from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.sampling import cuts
from cortex.neuron.kernels.sampling.reference import cut_reference, draw_reference
from cortex.neuron.kernels.sampling.rows import Draws, word_mask

CONTEXT = 64
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "all but one": {"top_k": -1},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 0.05},
    "min_p": {"min_p": 0.05},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.3},
    "window": {"repetition_penalty": 1.3, "repetition_window": 3},
    "bias": {"logit_bias": tuple((token, 3.0 - token % 5) for token in range(0, 40, 3))},
    "allowed": {"allowed_token_ids": tuple(range(5, 90, 2))},
    "one allowed": {"allowed_token_ids": (17,)},
    "logprobs": {"top_logprobs": 5},
}
PAIRS = list(itertools.combinations_with_replacement(OPTIONS, 2))


def params_of(names: tuple[str, ...], vocab: int, seed: int) -> SamplingParams:
    merged: dict[str, Any] = {"seed": seed}
    for name in names:
        merged |= OPTIONS[name]
    if merged.get("top_k") == -1:
        merged["top_k"] = vocab - 1
    return SamplingParams(**merged)


def place(
    sampler: Sampler, requests: list[EngineRequest], drafts: list[tuple[int, ...]], grammar: Tensor | None
) -> tuple[Draws, np.ndarray[Any, Any]]:
    draws: list[Draw] = []
    positions: list[int] = []
    for row, (one, drafted) in enumerate(zip(requests, drafts, strict=True)):
        sampler.assign(row, one, (4, 4, 9))
        for count, token in enumerate((*drafted, None)):
            draws.append(Draw(row, 3 + count, token))
            positions.append(len(one.prompt) + 2 + count)
    mask = None
    if grammar is not None:
        mask = GrammarMask(grammar, np.array([0 if index % 2 else -1 for index in range(len(draws))]))
    lines = draw_lines(np.arange(len(draws)), np.array(positions), draws, mask)
    words = sampler.no_mask if mask is None else mask.words
    return Draws(torch.from_numpy(lines).to(sampler.device), words, is_masked=mask is not None), lines


def logits_of(kind: str, count: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    logits = torch.randn(count, vocab + 16, device=device)[:, :vocab] * (4.0 if kind == "peaked" else 1.0)
    if kind == "ties":
        logits = logits.mul(2).round()
    if kind == "infinite":
        logits[:, ::3] = -torch.inf
    if kind == "equal":
        logits = torch.zeros_like(logits)
    return logits.to(dtype)


def assert_same(sampler: Sampler, logits: Tensor, draws: Draws, drawn: Drawn, names: list[Any]) -> None:
    tokens, healthy = draw_reference(logits, draws, sampler.tables)
    different = [
        (name, one, other)
        for name, one, other in zip(names, drawn.tokens.tolist(), tokens.tolist(), strict=True)
        if one != other
    ]
    assert not different
    assert torch.equal(drawn.healthy, healthy)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "infinite", "equal"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_every_pair_of_options_draws_what_the_reference_draws(kind: str, half: bool, device: torch.device) -> None:
    vocab = 300 if INTERPRETED else 20_011
    pairs = random.Random(f"{kind} {half}").sample(PAIRS, 8) if INTERPRETED else PAIRS
    requests = [
        EngineRequest("r", (1, 2, 3, 2), 32, params_of(pair, vocab, seed), stop_token_ids=(7,), min_tokens=seed % 5)
        for seed, pair in enumerate(pairs)
    ]
    drafts = [(8, 9, 8, 2)[: seed % 4] for seed in range(len(requests))]
    sampler = Sampler(len(requests), vocab, CONTEXT, device)
    grammar = torch.from_numpy(word_mask(range(0, vocab, 2), vocab))[None].to(device)
    draws, lines = place(sampler, requests, drafts, grammar)
    logits = logits_of(kind, len(draws), vocab, device, torch.bfloat16 if half else torch.float32)
    names = [pairs[row] for row in lines[:, 1]]
    before = sampler.tables.tally.clone()
    drawn = sampler.draw(logits, draws, lines[:, 1])
    sampler.tables.tally.copy_(before)
    assert_same(sampler, logits, draws, drawn, names)


CUTS = [(20, 1.0), (1, 1.0), (900, 1.0), (0, 0.9), (0, 1e-6), (0, 0.999), (50, 0.7)]
"""top_k and top_p"""


@pytest.mark.parametrize(
    ("lists", "kind", "half", "cut"),
    combinations([(1024, 1024), (1024, 16), (64, 64)], ["flat", "peaked", "ties"], [False, True], CUTS, one_of=5),
)
def test_cut_keeps_the_tokens_of_the_reference(
    lists: tuple[int, int], kind: str, half: bool, cut: tuple[int, float], device: torch.device
) -> None:
    """Also where the list of candidates is too long to be sorted, or to be kept, and all tokens are searched."""
    vocab, count = (1500 if INTERPRETED else 128_256), (2 if INTERPRETED else 5)
    top_k, top_p = cut
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, seed=1)
    sampler = Sampler(count, vocab, CONTEXT, device)
    draws, _ = place(sampler, [EngineRequest("r", (1,), 9, params)] * count, [()] * count, None)
    logits = logits_of(kind, count, vocab, device, torch.bfloat16 if half else torch.float32)
    values = logits.float()
    kept = _kept(logits, draws, sampler, *lists)
    for own, row in zip(kept, values, strict=True):
        expected = cut_reference(row / 0.8, top_k or vocab, top_p) > -torch.inf
        if top_p == 1.0:
            assert torch.equal(own, expected)
        # Sums of weights are rounded differently, so that the cut of top-p may move by as much.
        weights = (row / 0.8).double().softmax(-1)
        assert weights[own != expected].sum() <= max(1e-5, float(weights[expected].min()) * 1.01)


def _kept(logits: Tensor, draws: Draws, sampler: Sampler, most_listed: int, most_sorted: int) -> Tensor:
    from cortex.neuron.kernels.sampling.draw import first_pass

    tables = sampler.tables
    figures, _, highest, _ = first_pass(logits, draws, tables, adjusts=False)
    given = (logits, draws, tables, highest, figures)
    found = cuts.cut_vocabulary(*given, adjusts=False, most_listed=most_listed, most_sorted=most_sorted)
    shift = 16 if logits.dtype == torch.bfloat16 else 0
    values = logits.float()
    values[values == 0] = 0.0
    bits = values.contiguous().view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift
    order = torch.arange(tables.vocab - 1, -1, -1, device=logits.device)
    return (keys.long() << cuts.token_bits(tables.vocab)) + order >= found[:, None]
