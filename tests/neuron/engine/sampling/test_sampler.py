"""Sampling, compared with plain references for one row at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cortex.neuron.engine.memory.plan import penalty_bytes
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.engine.sampling.sampler import Draw, Drawn, GrammarMask, Sampler, draw_lines
from cortex.neuron.kernels.sampling.gumbel import gumbel_noise
from cortex.neuron.kernels.sampling.rows import Draws, word_mask

VOCAB = 24
CONTEXT = 64


def some_logits(rows: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def request(params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), **more: Any) -> EngineRequest:
    return EngineRequest("r", prompt, max_tokens=32, sampling=params, **more)


def draw_all(
    logits: Tensor, requests: list[EngineRequest], drawn: tuple[tuple[int, ...], ...] = (), mask: Tensor | None = None
) -> Drawn:
    """One step in which every request draws; `drawn`: what each drew before."""
    sampler = Sampler(len(requests), VOCAB, CONTEXT, torch.device("cpu"))
    pasts = drawn or ((),) * len(requests)
    for row, (one, past) in enumerate(zip(requests, pasts, strict=True)):
        sampler.assign(row, one, past)
    positions = [len(one.prompt) + len(past) - 1 for one, past in zip(requests, pasts, strict=True)]
    draws = [Draw(row, len(past)) for row, past in enumerate(pasts)]
    words = None
    if mask is not None:
        words = torch.from_numpy(np.stack([word_mask(row.nonzero()[:, 0].tolist(), VOCAB) for row in mask]))
    return draw_at(sampler, logits, positions, draws, words)


def draw_at(
    sampler: Sampler, logits: Tensor, positions: Sequence[int], draws: list[Draw], words: Tensor | None = None
) -> Drawn:
    """`words`: the tokens that each draw may draw."""
    mask = None if words is None else GrammarMask(words, np.arange(len(draws)))
    lines = draw_lines(np.arange(len(draws)), np.array(positions), draws, mask)
    given = sampler.no_mask if words is None else words
    return sampler.draw(logits, Draws(torch.from_numpy(lines), given, is_masked=words is not None), lines[:, 1])


def frequencies(logits: Tensor, params: SamplingParams, count: int) -> Counter[int]:
    """How often each token comes up over many seeds and positions."""
    num_rows = min(count, 100)
    sampler = Sampler(num_rows, VOCAB, CONTEXT, torch.device("cpu"))
    for row in range(num_rows):
        sampler.assign(row, request(SamplingParams(**{**as_dict(params), "seed": row})), ())
    draws, seen = [Draw(row, 0) for row in range(num_rows)], Counter[int]()
    for position in range(count // num_rows):
        seen.update(draw_at(sampler, logits.expand(num_rows, -1), [position] * num_rows, draws).tokens.tolist())
    return seen


def as_dict(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def kept_tokens(logits: Tensor, params: SamplingParams) -> dict[int, float]:
    """The reference: the tokens that may be drawn, and how likely each is."""
    scaled = [value / params.temperature for value in logits.tolist()]
    order = sorted(range(VOCAB), key=lambda token: -scaled[token])
    if params.top_k:
        order = order[: params.top_k]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    kept: list[int] = []
    total, before = sum(weights.values()), 0.0
    for token in order:
        if kept and before >= params.top_p * total:
            break
        kept.append(token)
        before += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def penalised(logits: Tensor, params: SamplingParams, prompt: Sequence[int], drawn: tuple[int, ...]) -> Tensor:
    """The reference: presence and frequency of what was drawn, repetition of everything in the window."""
    result = logits.clone()
    for token, count in Counter(drawn).items():
        result[token] -= params.presence_penalty + params.frequency_penalty * count
    for token in set((*prompt, *drawn)[-params.repetition_window if params.repetition_window else 0 :]):
        value = result[token]
        result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    return result


def test_greedy_draws_the_largest_logit() -> None:
    logits = some_logits(5)
    drawn = draw_all(logits, [request(SamplingParams(temperature=0.0))] * 5)
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    assert drawn.healthy.all()
    assert drawn.logprobs is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=8, top_p=0.9, min_p=0.05),
    ],
    ids=lambda params: str(params)[15:70],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over fixed seeds: the statistic's mean is its degrees of freedom."""
    count = 500
    logits = some_logits(1, seed=3, spread=1.2)
    expected = kept_tokens(logits[0], params)
    seen = frequencies(logits, params, count)
    assert set(seen) <= set(expected), "a token was drawn that should have been cut off"
    statistic = sum((seen[token] - count * p) ** 2 / (count * p) for token, p in expected.items())
    freedom = max(1, len(expected) - 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.9),
    temperature=st.floats(0.1, 3.0),
)
def test_only_kept_tokens_are_drawn(seed: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    logits = some_logits(1, seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    slack = SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=min_p - 1e-5)
    assert set(frequencies(logits, params, 40)) <= set(kept_tokens(logits[0], slack))


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-6), SamplingParams(min_p=1.0)])
def test_top_token_is_always_kept(params: SamplingParams) -> None:
    logits = some_logits(1)
    assert set(frequencies(logits, params, 30)) == {int(logits.argmax())}


def test_top_k_1_draws_the_greedy_token_for_the_seeds_with_the_largest_noise() -> None:
    vocab, position = 65_536, 2
    largest = torch.cat(
        [
            gumbel_noise(torch.arange(first, first + 32), torch.tensor(position), vocab).amax(-1)
            for first in range(0, 128, 32)
        ]
    )
    seeds = largest.topk(16).indices.tolist()
    sampler = Sampler(len(seeds), vocab, CONTEXT, torch.device("cpu"))
    for row, seed in enumerate(seeds):
        sampler.assign(row, request(SamplingParams(temperature=1.5, top_k=1, seed=seed)))
    logits = torch.randn(len(seeds), vocab, generator=torch.Generator().manual_seed(5))
    draws = [Draw(row, 0) for row in range(len(seeds))]
    drawn = draw_at(sampler, logits, [position] * len(seeds), draws)
    assert torch.equal(drawn.tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-45])
def test_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = some_logits(1)
    assert set(frequencies(logits, SamplingParams(temperature=temperature), 30)) == {int(logits.argmax())}


@given(
    seed=st.integers(0, 10_000),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    window=st.integers(0, 12),
    presence=st.sampled_from([0.0, 0.8, -0.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.3]),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10),
    drawn=st.lists(st.integers(0, VOCAB - 1), max_size=10),
)
def test_penalties_equal_the_reference(
    seed: int,
    repetition: float,
    window: int,
    presence: float,
    frequency: float,
    prompt: list[int],
    drawn: list[int],
) -> None:
    """The penalised row is between two others with other penalties, and draws greedily from the changed logits."""
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=repetition,
        repetition_window=window,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    logits = some_logits(3, seed)
    requests = [
        request(SamplingParams(temperature=0.0)),
        request(params, tuple(prompt)),
        request(SamplingParams(temperature=0.0, frequency_penalty=1.5), (0,)),
    ]
    tokens = draw_all(logits, requests, ((5,), tuple(drawn), (7, 7))).tokens
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] == penalised(logits[1], params, tuple(prompt), tuple(drawn)).argmax()
    assert tokens[2] == penalised(logits[2], requests[2].sampling, (0,), (7, 7)).argmax()


def test_penalties_count_drawn_tokens_step_by_step() -> None:
    """A continued row is penalised like a row that gets all earlier tokens at once."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.6, repetition_penalty=1.2, repetition_window=5)
    sampler = Sampler(2, VOCAB, CONTEXT, torch.device("cpu"))
    one = request(params)
    sampler.assign(1, one)
    drawn: tuple[int, ...] = ()
    for step in range(20):
        logits = some_logits(1, seed=4)
        position = len(one.prompt) + step - 1
        result = draw_at(sampler, logits, [position], [Draw(1, step)])
        assert result.tokens[0] == penalised(logits[0], params, one.prompt, drawn).argmax()
        assert result.tokens[0] == draw_all(logits, [one], (drawn,)).tokens[0]
        drawn += (int(result.tokens[0]),)
    assert len(set(drawn)) > 1


def test_reassigned_row_forgets_its_previous_request() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=100.0, repetition_penalty=9.0)
    sampler = Sampler(1, VOCAB, CONTEXT, torch.device("cpu"))
    sampler.assign(0, request(params, tuple(range(VOCAB))), tuple(range(VOCAB)))
    sampler.assign(0, request(params, (1,)))
    logits = some_logits(1).abs()
    logits[0, 1] = 0.0
    assert draw_at(sampler, logits, [0], [Draw(0, 0)]).tokens[0] == logits.argmax()


def test_logit_bias_raises_lowers_and_ignores_unknown_tokens() -> None:
    logits = some_logits(2)
    best = int(logits[0].argmax())
    bias = ((best, -100.0), (7, 3.0), (VOCAB, 100.0), (VOCAB + 9, 100.0), (-1, 100.0))
    requests = [request(SamplingParams(temperature=0.0, logit_bias=bias)), request(SamplingParams(temperature=0.0))]
    tokens = draw_all(logits, requests).tokens
    expected = logits[0].clone()
    expected[best] -= 100
    expected[7] += 3
    assert tokens.tolist() == [int(expected.argmax()), int(logits[1].argmax())]


def test_stop_tokens_are_not_drawn_below_min_tokens() -> None:
    logits = some_logits(1)
    best = int(logits.argmax())
    one = request(SamplingParams(temperature=0.0), stop_token_ids=(best, VOCAB + 5, -3), min_tokens=2)
    for drawn, allowed in (((), False), ((4,), False), ((4, 4), True)):
        assert (int(draw_all(logits, [one], (drawn,)).tokens[0]) == best) is allowed


def test_masked_tokens_are_not_drawn() -> None:
    logits = some_logits(2)
    mask = torch.ones(2, VOCAB, dtype=torch.bool)
    mask[0, logits[0].argmax()] = False
    tokens = draw_all(logits, [request(SamplingParams(temperature=0.0))] * 2, mask=mask).tokens
    assert tokens.tolist() == [int(logits[0].topk(2).indices[1]), int(logits[1].argmax())]
    mask[1] = False
    mask[1, 11] = True
    assert draw_all(logits, [request(SamplingParams(seed=seed)) for seed in (1, 2)], mask=mask).tokens[1] == 11


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, 2**64 - 1, -1, 10**30])
def test_same_seed_draws_the_same_in_any_batch(seed: int) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=seed)
    logits = some_logits(6, seed=9)
    alone = [int(draw_all(logits[4:5], [request(params)]).tokens[0])]
    others = [
        request(SamplingParams(temperature=0.0)),
        request(SamplingParams(temperature=0.9, seed=5, top_k=2)),
        request(SamplingParams(frequency_penalty=1.0, temperature=0.7)),
        request(SamplingParams(min_p=0.3)),
        request(params),
        request(SamplingParams(logit_bias=((3, 4.0),), top_logprobs=2)),
    ]
    assert [int(draw_all(logits, others).tokens[4])] == alone


def test_other_seeds_and_positions_draw_other_tokens() -> None:
    flat = torch.zeros(64, VOCAB)
    by_seed = draw_all(flat, [request(SamplingParams(seed=seed)) for seed in range(64)]).tokens
    assert len(set(by_seed.tolist())) > VOCAB // 2
    prompts = [tuple([1] * length) for length in range(1, 64)]
    by_position = draw_all(flat[:63], [request(SamplingParams(seed=1), prompt) for prompt in prompts]).tokens
    assert len(set(by_position.tolist())) > VOCAB // 2


def test_without_a_seed_draws_differ() -> None:
    flat = torch.zeros(64, VOCAB)
    assert len(set(draw_all(flat, [request(SamplingParams())] * 64).tokens.tolist())) > VOCAB // 2


def test_greedy_rows_stay_greedy_beside_sampled_ones() -> None:
    logits = some_logits(4)
    sampled = request(SamplingParams(temperature=3.0, top_k=5, top_p=0.9, min_p=0.01))
    greedy = request(SamplingParams(temperature=0.0))
    for _ in range(10):
        tokens = draw_all(logits, [greedy, sampled, greedy, sampled]).tokens
        assert tokens[0] == logits[0].argmax()
        assert tokens[2] == logits[2].argmax()


def test_logprobs_are_of_the_unmodified_logits() -> None:
    """Before bias, penalties and temperature."""
    logits = some_logits(3)
    requests = [
        request(SamplingParams(temperature=0.0, top_logprobs=0, logit_bias=((5, 50.0),))),
        request(SamplingParams(temperature=2.0, seed=3, top_logprobs=4, repetition_penalty=2.0)),
        request(SamplingParams(temperature=0.0)),
    ]
    drawn = draw_all(logits, requests)
    reference = logits.log_softmax(-1)
    assert drawn.logprobs is not None
    assert drawn.top_ids is not None
    assert drawn.top_logprobs is not None
    assert drawn.tokens[0] == 5
    torch.testing.assert_close(drawn.logprobs, reference.gather(1, drawn.tokens[:, None])[:, 0])
    torch.testing.assert_close(drawn.top_logprobs, reference.topk(4).values)
    assert torch.equal(drawn.top_ids, reference.topk(4).indices)


def test_top_logprobs_beyond_the_vocabulary_return_all_tokens() -> None:
    drawn = draw_all(some_logits(1), [request(SamplingParams(top_logprobs=VOCAB + 20))])
    assert drawn.top_ids is not None
    assert sorted(drawn.top_ids[0].tolist()) == list(range(VOCAB))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_with_non_finite_logits_are_unhealthy(bad: float) -> None:
    logits = some_logits(3)
    logits[1, 4] = bad
    requests = [request(SamplingParams(seed=1)), request(SamplingParams(seed=2)), request(SamplingParams())]
    assert draw_all(logits, requests).healthy.tolist() == [True, False, True]
    assert draw_all(torch.full((1, VOCAB), -math.inf), requests[:1]).healthy.tolist() == [False]


def test_step_of_a_row_with_many_nans_ends_as_unhealthy() -> None:
    vocab = 3000
    sampler = Sampler(1, vocab, CONTEXT, torch.device("cpu"))
    sampler.assign(0, request(SamplingParams(top_p=0.9, seed=1)))
    assert draw_at(sampler, torch.full((1, vocab), math.nan), [2], [Draw(0, 0)]).healthy.tolist() == [False]


def test_top_p_that_is_one_in_single_precision_cuts_nothing() -> None:
    logits = -some_logits(1).abs() - 1
    tokens = frequencies(logits, SamplingParams(top_p=0.999999999, temperature=5.0), 60)
    assert len(tokens) > VOCAB // 3


def test_half_precision_logits_are_sampled_in_float32() -> None:
    logits = some_logits(2).to(torch.bfloat16)
    params = SamplingParams(temperature=0.8, seed=1, top_logprobs=1, frequency_penalty=0.5)
    drawn = draw_all(logits, [request(params), request(SamplingParams(temperature=0.0))])
    assert drawn.tokens[1] == logits[1].argmax()
    assert drawn.logprobs is not None
    assert drawn.logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0, logit_bias=((1, 1.0),)), False),
        (SamplingParams(temperature=0.0, top_logprobs=0), False),
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), False),
    ],
)
def test_only_a_plain_argmax_is_plain(params: SamplingParams, plain: bool) -> None:
    sampler = Sampler(1, VOCAB, CONTEXT, torch.device("cpu"))
    sampler.assign(0, request(params))
    assert sampler.is_plain([Draw(0, 0)]) is plain


def test_request_below_min_tokens_is_not_plain() -> None:
    sampler = Sampler(1, VOCAB, CONTEXT, torch.device("cpu"))
    sampler.assign(0, request(SamplingParams(temperature=0.0), stop_token_ids=(1,), min_tokens=2))
    assert [sampler.is_plain([Draw(0, count)]) for count in (0, 1, 2)] == [False, False, True]


@pytest.mark.parametrize(("rows", "vocab", "context"), [(3, 50, 20), (17, 1000, 128)])
def test_penalties_take_the_memory_that_a_load_leaves_for_them(rows: int, vocab: int, context: int) -> None:
    sampler = Sampler(rows, vocab, context, torch.device("cpu"))
    assert sampler.penalty_bytes == 0
    sampler.assign(0, request(SamplingParams(repetition_penalty=1.2), (1, 2)))
    assert sampler.penalty_bytes == penalty_bytes(rows, vocab, context)
