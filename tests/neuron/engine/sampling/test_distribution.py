"""Chi-square of drawn tokens against exact probabilities: every option alone and in pairs, small and large
vocabularies, ties, infinities, few allowed tokens."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.engine.sampling.sampler import Draw, Sampler, draw_lines
from cortex.neuron.kernels.sampling.rows import Draws

PROMPT, PAST = (1, 2, 3, 2), (4, 4, 9)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.8},
    "window": {"repetition_penalty": 1.8, "repetition_window": 3},
    "bias": {"logit_bias": tuple((token, 2.0 - token % 5) for token in range(0, 40, 3))},
    "allowed": {"allowed_token_ids": tuple(range(0, 90, 2))},
    "one allowed": {"allowed_token_ids": (17,)},
}
PAIRS = list(itertools.combinations_with_replacement(OPTIONS, 2))
KINDS = ("flat", "ties", "infinite", "peaked")
LEAST_EXPECTED = 4


def logits_of(kind: str, vocab: int, seed: int) -> NDArray[np.float64]:
    """Most of the mass is on few tokens, also of a large vocabulary."""
    source = np.random.default_rng(seed)
    logits = source.normal(-12.0, 1.0, vocab)
    likely = np.concatenate((np.arange(18), source.choice(np.arange(18, vocab), 12, replace=False)))
    logits[likely] = source.normal(1.0, 2.0 if kind == "peaked" else 0.8, len(likely))
    if kind == "ties":
        logits = np.round(logits)
    if kind == "infinite":
        logits[5::3] = -np.inf
        logits[17] = 0.0
    return logits.astype(np.float32).astype(np.float64)


def probabilities(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """By the options' definitions, in their order."""
    x = logits.copy()
    if params.allowed_token_ids:
        allowed = np.zeros(len(x), bool)
        allowed[list(params.allowed_token_ids)] = True
        x[~allowed] = -np.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for token, count in Counter(PAST).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * count
    history = PROMPT + PAST
    for token in set(history[-params.repetition_window :] if params.repetition_window else history):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    x /= params.temperature
    order = np.argsort(-x, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(x[order] - x[order[0]])
    order = order[(weights.cumsum() - weights) < params.top_p * weights.sum()] if params.top_p < 1 else order
    kept = order[np.exp(x[order] - x[order[0]]) >= params.min_p]
    result = np.zeros(len(x))
    result[kept] = np.exp(x[kept] - x[kept[0]])
    return result / result.sum()


def drawn_tokens(logits: NDArray[np.float64], params: dict[str, Any], count: int, first_seed: int = 0) -> list[int]:
    """Of many seeds and positions."""
    num_rows = 16
    sampler = Sampler(num_rows, len(logits), 64, torch.device("cpu"))
    for row in range(num_rows):
        sampler.assign(row, EngineRequest("r", PROMPT, 32, SamplingParams(**params, seed=first_seed + row)), PAST)
    given = torch.from_numpy(logits).float()[None].expand(num_rows, -1)
    tokens: list[int] = []
    draws, tally = [Draw(row, len(PAST)) for row in range(num_rows)], sampler.tables.tally.clone()
    for number in range(count // num_rows):
        positions = np.full(num_rows, len(PROMPT) + len(PAST) - 1 + number)
        lines = draw_lines(np.arange(num_rows), positions, draws, None)
        tokens += sampler.draw(given, Draws(torch.from_numpy(lines), sampler.no_mask), lines[:, 1]).tokens.tolist()
        sampler.tables.tally.copy_(tally)
    return tokens


def surplus(tokens: list[int], expected: NDArray[np.float64]) -> tuple[float, int]:
    """Chi-square and its degrees of freedom, of bins in which enough tokens are expected."""
    assert all(expected[token] > 0 for token in tokens), "a token was drawn that the options rule out"
    bin_of: dict[int, int] = {}
    mass = [0.0]
    for token in map(int, np.argsort(-expected, kind="stable")):
        if expected[token] > 0:
            bin_of[token] = len(mass) - 1
            mass[-1] += float(expected[token])
            if mass[-1] * len(tokens) >= LEAST_EXPECTED and 1 - sum(mass) >= LEAST_EXPECTED / len(tokens):
                mass.append(0.0)
    seen = Counter(bin_of[token] for token in tokens)
    statistic = sum((seen[number] - len(tokens) * p) ** 2 / (len(tokens) * p) for number, p in enumerate(mass))
    return statistic, len(mass) - 1


def assert_follows(statistic: float, freedom: int) -> None:
    assert statistic < freedom + 5 * math.sqrt(2 * max(1, freedom))


def test_every_pair_of_options_draws_by_its_probabilities() -> None:
    total, freedom = 0.0, 0
    for index, names in enumerate(PAIRS):
        params: dict[str, Any] = {}
        for name in names:
            params |= OPTIONS[name]
        logits = logits_of(KINDS[index % len(KINDS)], 300, index)
        expected = probabilities(logits, SamplingParams(**params))
        statistic, more = surplus(drawn_tokens(logits, params, 32, 16 * index), expected)
        assert statistic < more + 7 * math.sqrt(2 * max(1, more)), names
        total, freedom = total + statistic, freedom + more
    assert freedom > 150
    assert_follows(total, freedom)


@pytest.mark.parametrize(("vocab", "count"), [(300, 320), (5_003, 160), (262_144, 32)])
@pytest.mark.parametrize("names", [("plain",), ("temperature", "top_p", "min_p"), ("top_k", "bias", "repetition")])
def test_vocabularies_of_any_size_are_drawn_from_by_probability(vocab: int, count: int, names: tuple[str, ...]) -> None:
    params: dict[str, Any] = {}
    for name in names:
        params |= OPTIONS[name]
    logits = logits_of("flat", vocab, 3)
    assert_follows(*surplus(drawn_tokens(logits, params, count), probabilities(logits, SamplingParams(**params))))
