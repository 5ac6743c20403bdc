"""A request gets the tokens that it would get alone, whatever else is in the batch; its memory is free at its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.request import SamplingParams, StepOutput

from ..engine_runs import tokens_of
from .tiny_engine import CONTEXT, PAGE, VOCAB, EngineMaker, ask, mixed_batch, run, some_tokens


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"late": True},
        {"late": True, "prefill_chunk_tokens": 7},
        {"max_num_seqs": 2},
        {"late": True, "pages": 8},
        {"pages": 8, "prefill_chunk_tokens": 33},
    ],
    ids=str,
)
def test_mixed_batch_responds_as_each_request_does_alone(
    make_engine: EngineMaker, alone: dict[str, list[int]], changes: dict[str, Any]
) -> None:
    """Batched, chunked, with few rows, with few pages; the second time from the cache."""
    engine = make_engine(**changes)
    for _ in range(2):
        outputs = run(engine, *mixed_batch())
        assert {name: tokens_of(parts) for name, parts in outputs.items()} == alone


@pytest.mark.parametrize("late", [False, True])
def test_preempted_requests_continue_unchanged(make_engine: EngineMaker, late: bool) -> None:
    """Nothing is reserved, so that more sequences start than fit."""
    requests = [
        ask(str(number), some_tokens(30, seed=number), 60, SamplingParams(temperature=0.0, presence_penalty=0.5))
        for number in range(3)
    ]
    roomy, tight = make_engine(late=late), make_engine(late=late, pages=6, reserved_tokens=0)
    expected, outputs = run(roomy, *requests), run(tight, *requests)
    assert roomy.stats().preemptions == 0
    assert tight.stats().preemptions > 0
    for name, parts in outputs.items():
        assert tokens_of(parts) == tokens_of(expected[name])
        assert sum(part.cached_tokens is not None for part in parts) == 1


def test_short_responses_wait_for_pages_instead_of_preempting(make_engine: EngineMaker) -> None:
    tight = make_engine(pages=6)
    outputs = run(tight, *(ask(str(number), some_tokens(30, seed=number), 60) for number in range(3)))
    assert [len(tokens_of(parts)) for parts in outputs.values()] == [60] * 3
    assert tight.stats().preemptions == 0


def test_later_turn_takes_all_but_its_end_from_the_cache(make_engine: EngineMaker) -> None:
    engine = make_engine()
    history = some_tokens(50)
    for turn in range(4):
        (outputs,) = run(engine, ask(str(turn), history, 20)).values()
        fresh = make_engine()
        assert tokens_of(outputs) == tokens_of(run(fresh, ask("fresh", history, 20))["fresh"])
        known = 0 if turn == 0 else (len(history) - 6) // PAGE * PAGE
        assert outputs[0].cached_tokens == known
        assert all(output.cached_tokens is None for output in outputs[1:])
        history = (*history, *tokens_of(outputs), *some_tokens(5, seed=turn))


def test_fully_cached_prompt_computes_one_token(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = some_tokens(2 * PAGE)
    first = tokens_of(run(engine, ask("first", prompt))["first"])
    before = engine.stats().prompt_tokens
    again = run(engine, ask("again", prompt), ask("and again", prompt))
    assert engine.stats().prompt_tokens - before == 2
    for outputs in again.values():
        assert outputs[0].cached_tokens == 2 * PAGE - 1
        assert tokens_of(outputs) == first


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("steps", range(9))
def test_cancel_frees_everything_at_once_in_every_phase(make_engine: EngineMaker, steps: int, late: bool) -> None:
    """Waiting, prefilling, drawing, in flight, decoding: `steps` into a prompt of six chunks and four tokens."""
    engine = make_engine(late=late, prefill_chunk_tokens=16, max_num_seqs=2)
    engine.submit(ask("r", some_tokens(90), 4))
    seen = [output for _ in range(steps) for output in engine.step()]
    assert all(output.finish is None for output in seen)
    engine.cancel("r")
    assert engine.stats().used_pages == engine.stats().running == engine.stats().waiting == 0
    engine.check_integrity()
    last = []
    while engine.has_work:
        last += engine.step()
    assert last == [StepOutput("r", finish="cancelled")]
    assert run(engine, ask("r", some_tokens(90), 4))["r"][-1].finish == "length", "its id can be used again"


@pytest.mark.parametrize("late", [False, True])
def test_cancel_does_not_change_other_requests(
    make_engine: EngineMaker, alone: dict[str, list[int]], late: bool
) -> None:
    engine = make_engine(late=late, pages=12)
    said: dict[str, list[int]] = {}
    names = list(alone)
    for request in mixed_batch():
        engine.submit(request)
    for step in range(1000):
        if step < 2 * len(names) and step % 4 == 0:
            engine.cancel(names[step // 2])
        for output in engine.step():
            said.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish == "cancelled":
                assert said[output.request_id] == alone[output.request_id][: len(said[output.request_id])]
                del said[output.request_id]
        engine.check_integrity()
        if not engine.has_work:
            break
    assert len(said) >= len(names) // 2
    assert said == {name: alone[name] for name in said}


def test_cancel_ignores_unknown_ids(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.cancel("nobody")
    assert not engine.has_work
    run(engine, ask("r", (1, 2)))
    engine.cancel("r")
    assert not engine.has_work
    engine.submit(ask("twice", (1, 2)))
    engine.cancel("twice")
    engine.cancel("twice")
    assert engine.step() == [StepOutput("twice", finish="cancelled")]


@pytest.mark.parametrize("late", [False, True])
def test_stop_token_ends_a_request_and_is_returned(make_engine: EngineMaker, late: bool) -> None:
    engine = make_engine(late=late)
    prompt = some_tokens(40, seed=9)
    free = run(engine, ask("free", prompt, 30))["free"]
    assert free[-1].finish == "length"
    said = tokens_of(free)
    assert len(said) == 30
    stop = said[7]
    first = said.index(stop)
    stopped = run(engine, ask("stopped", prompt, 30, stop_token_ids=(VOCAB + 3, stop)))["stopped"]
    assert tokens_of(stopped) == said[: first + 1]
    assert stopped[-1].finish == "stop"
    assert stopped[-1].tokens == (stop,)


def test_stop_token_at_max_tokens_finishes_with_stop(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = some_tokens(40, seed=9)
    (first,) = tokens_of(run(engine, ask("free", prompt, 1))["free"])
    assert run(engine, ask("stopped", prompt, 1, stop_token_ids=(first,)))["stopped"][-1].finish == "stop"


def test_stop_tokens_are_ignored_below_min_tokens(make_engine: EngineMaker) -> None:
    engine = make_engine()
    everything = tuple(range(VOCAB // 2))
    outputs = run(engine, ask("r", some_tokens(10), 40, stop_token_ids=everything, min_tokens=6))["r"]
    said = tokens_of(outputs)
    assert len(said) > 6
    assert all(token not in everything for token in said[:6])
    assert outputs[-1].finish == ("stop" if said[-1] in everything else "length")


def test_request_can_fill_the_context(make_engine: EngineMaker) -> None:
    engine = make_engine()
    outputs = run(engine, ask("full", some_tokens(CONTEXT - 10), 10), ask("one", some_tokens(CONTEXT - 1, 2), 1))
    assert [len(tokens_of(parts)) for parts in outputs.values()] == [10, 1]


def test_each_request_gets_the_number_of_logprobs_it_asked_for(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = some_tokens(20)
    outputs = run(
        engine,
        ask("none", prompt, 3),
        ask("drawn", prompt, 3, SamplingParams(temperature=0.0, top_logprobs=0)),
        ask("top", prompt, 3, SamplingParams(temperature=0.0, top_logprobs=3)),
    )
    assert all(output.logprobs == () for output in outputs["none"])
    for drawn, top in zip(outputs["drawn"], outputs["top"], strict=True):
        ((one,), (many,)) = drawn.logprobs, top.logprobs
        assert one.top_ids == ()
        assert one.logprob == pytest.approx(many.logprob, abs=1e-5)
        assert len(many.top_ids) == len(many.top_logprobs) == 3
        assert many.top_ids[0] == top.tokens[0]
        assert many.top_logprobs[0] == pytest.approx(many.logprob, abs=1e-6)


def test_same_seed_draws_the_same_tokens_in_any_batch(make_engine: EngineMaker) -> None:
    params = SamplingParams(temperature=1.2, seed=99)
    seeded = ask("mine", some_tokens(40), 25, params)
    said = tokens_of(run(make_engine(), seeded)["mine"])
    assert tokens_of(run(make_engine(late=True, prefill_chunk_tokens=9), *mixed_batch(), seeded)["mine"]) == said
    other = run(make_engine(), ask("other", some_tokens(40), 25, replace(params, seed=100)))["other"]
    assert tokens_of(other) != said


def test_stats_count_completed_work(make_engine: EngineMaker) -> None:
    engine = make_engine()
    assert engine.stats().steps == engine.stats().prompt_tokens == engine.stats().completion_tokens == 0
    prompt = some_tokens(70)
    run(engine, ask("first", prompt, 5))
    run(engine, ask("second", prompt, 5))
    stats = engine.stats()
    assert stats.completion_tokens == 10
    assert stats.cached_tokens == 69
    assert stats.prompt_tokens == 70 + 1
    assert stats.steps == 10
    assert stats.cached_pages == 3
    assert stats.num_pages == engine.info.num_pages


def test_busy_engine_reports_running_and_waiting(make_engine: EngineMaker) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(ask("first", some_tokens(40)))
    engine.submit(ask("second", some_tokens(40, 1)))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_pages) == (1, 1, 2)


def prompt_logprobs_of(checkpoint: Path, prompt: Sequence[int]) -> torch.Tensor:
    """[prompt - 1, vocab]: the reference's log-probabilities at every place after the first."""
    reference = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([prompt])).logits[0, :-1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("late", [False, True])
def test_scores_every_prompt_token_as_the_reference_does(
    make_engine: EngineMaker, checkpoint: Path, late: bool
) -> None:
    """In chunks, together with other requests, and although the prefix is cached."""
    engine = make_engine(late=late, prefill_chunk_tokens=48)
    prompt = some_tokens(150, seed=4)
    run(engine, ask("warm", prompt, 3))
    scored = ask("scored", prompt, 3, prompt_logprobs=2)
    outputs = run(engine, ask("other", some_tokens(90, seed=5), 6), scored, ask("unscored", prompt, 3))
    assert all(not output.prompt_logprobs for output in outputs["unscored"] + outputs["scored"][1:])
    entries = outputs["scored"][0].prompt_logprobs
    assert outputs["scored"][0].cached_tokens == 0
    expected = prompt_logprobs_of(checkpoint, prompt)
    assert len(entries) == len(prompt) - 1
    for entry, token, row in zip(entries, prompt[1:], expected, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert entry.top_logprobs == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
        assert (entry.rank == 1) == (entry.top_ids[0] == token)
    assert tokens_of(outputs["scored"]) == tokens_of(outputs["unscored"])


def test_scores_the_prompt_of_a_preempted_request_once(make_engine: EngineMaker, checkpoint: Path) -> None:
    engine = make_engine(late=True, pages=5, reserved_tokens=0, prefill_chunk_tokens=16)
    first = ask("first", some_tokens(60, seed=6), 40)
    scored = ask("scored", some_tokens(70, seed=7), 30, prompt_logprobs=0)
    outputs = run(engine, first, scored)
    assert engine.stats().preemptions > 0
    reported = [output.prompt_logprobs for output in outputs["scored"] if output.prompt_logprobs]
    assert len(reported) == 1
    expected = prompt_logprobs_of(checkpoint, scored.prompt)
    for entry, token, row in zip(reported[0], scored.prompt[1:], expected, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)


def test_prompt_that_arrives_as_an_array_is_like_any_other(make_engine: EngineMaker) -> None:
    """With scores and penalties, which read it; and it stays as it is."""
    engine, tokens = make_engine(), some_tokens(75, seed=8)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    prompt = array("I", tokens)
    found = [run(engine, ask("r", each, 40, params, prompt_logprobs=1))["r"] for each in (tokens, prompt, prompt)]
    assert tokens_of(found[0]) == tokens_of(found[1]) == tokens_of(found[2])
    assert found[0][0].prompt_logprobs == found[1][0].prompt_logprobs
    assert tuple(prompt) == tokens


def test_draws_only_allowed_tokens(make_engine: EngineMaker) -> None:
    engine = make_engine()
    greedy = SamplingParams(temperature=0.0, allowed_token_ids=(3, 5, VOCAB + 7))
    sampled = SamplingParams(temperature=5.0, seed=1, allowed_token_ids=(3, 5))
    outputs = run(engine, ask("greedy", (1, 2), 8, greedy), ask("sampled", (1, 2), 20, sampled), ask("free", (1, 2), 8))
    assert set(tokens_of(outputs["greedy"])) <= {3, 5}
    assert set(tokens_of(outputs["sampled"])) == {3, 5}
    assert not set(tokens_of(outputs["free"])) <= {3, 5}
    with pytest.raises(RequestError, match="allowed token ids"):
        engine.submit(ask("none", (1, 2), 8, SamplingParams(allowed_token_ids=(VOCAB,))))
