"""Requests that an engine cannot serve, and steps that fail: other requests get the same tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import FaultyRequest, RequestError
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.request import EngineRequest, SamplingParams, StepOutput
from cortex.neuron.engine.sampling.sampler import Sampler
from cortex.neuron.kernels.sampling.rows import FREQUENCY, number

from ..engine_runs import tokens_of
from .tiny_engine import CONTEXT, PAGE, VOCAB, EngineMaker, ask, mixed_batch, run, some_tokens


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (ask("bad", ()), "empty"),
        (ask("bad", (1,), 0), "max_tokens is 0"),
        (ask("bad", (1, VOCAB)), f"vocabulary of {VOCAB}"),
        (ask("bad", (-1,)), f"vocabulary of {VOCAB}"),
        (ask("bad", (1,) * CONTEXT, 1), f"asks for 1 more, but the context of this model holds {CONTEXT}"),
        (ask("running", (1,)), "already running"),
        (ask("bad", (1,), 5, SamplingParams(temperature=math.nan)), "temperature is nan"),
        (ask("bad", (1,), 5, SamplingParams(temperature=1e39)), "temperature is 1e[+]39"),
        (ask("bad", (1,), 5, SamplingParams(temperature=-1.0)), "temperature is -1"),
        (ask("bad", (1,), 5, SamplingParams(top_p=math.nan)), "top_p is nan"),
        (ask("bad", (1,), 5, SamplingParams(min_p=2.0)), "min_p is 2.0: it must be between 0 and 1"),
        (ask("bad", (1,), 5, SamplingParams(repetition_penalty=0.0)), "repetition_penalty is 0"),
        (ask("bad", (1,), 5, SamplingParams(presence_penalty=math.inf)), "presence_penalty is inf"),
        (ask("bad", (1,), 5, SamplingParams(frequency_penalty=10**400)), "frequency_penalty is 1000"),
        (ask("bad", (1,), 5, SamplingParams(logit_bias=((3, math.inf),))), "logit_bias of token 3 is inf"),
        (ask("bad", (1,), 5, SamplingParams(top_logprobs=-1)), "top_logprobs is -1"),
    ],
)
def test_rejects_an_impossible_request_without_affecting_others(
    make_engine: EngineMaker, bad: EngineRequest, message: str
) -> None:
    engine = make_engine()
    engine.submit(ask("running", (1, 2, 3), 5))
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.submit(bad)
    said = []
    while engine.has_work:
        said += engine.step()
    assert {output.request_id for output in said} == {"running"}
    assert said[-1].finish == "length"


@pytest.mark.parametrize("late", [False, True])
def test_non_finite_logits_end_only_their_own_request(make_engine: EngineMaker, late: bool) -> None:
    start = some_tokens(40)
    healthy = ask("healthy", start, 10)
    expected = tokens_of(run(make_engine(), healthy)["healthy"])
    faulty_token = next(token for token in range(VOCAB) if token not in (*start, *expected))
    engine = make_engine(late=late, prefill_chunk_tokens=40)
    engine.model.embedding.matrix.tensors[0][faulty_token] = torch.nan
    faulty = ask("faulty", (*start, faulty_token, *start[:29]))
    for _ in range(2):
        outputs = run(engine, healthy, faulty)
        assert tokens_of(outputs["healthy"]) == expected
        (last,) = outputs["faulty"]
        assert last.finish == "error"
        assert "not finite" in (last.error or "")
        assert last.cached_tokens is None
    again = run(engine, ask("again", (*faulty.prompt[:PAGE], 1)))["again"]
    assert again[0].cached_tokens == 0, "a page of the failed request is still in the cache"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("when", ["before the forward pass", "after it"])
@pytest.mark.parametrize("step", range(1, 8))
def test_failed_step_is_repeated_with_the_same_result(
    make_engine: EngineMaker,
    alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    when: str,
    late: bool,
) -> None:
    names, max_tokens = ("long", "penalised", "seeded"), 10
    requests = [replace(request, max_tokens=max_tokens) for request in mixed_batch() if request.id in names]
    engine = make_engine(late=late, prefill_chunk_tokens=33)
    launch = Runner.launch
    launches = 0

    def failing(*arguments: Any, **named: Any) -> Any:
        nonlocal launches
        launches += 1
        fails = launches in (step, step + 2)
        if fails and when == "before the forward pass":
            raise RuntimeError("out of memory")
        launched = launch(*arguments, **named)
        if fails:
            raise RuntimeError("out of memory")
        return launched

    monkeypatch.setattr(Runner, "launch", failing)
    said: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    failures = 0
    while engine.has_work:
        try:
            outputs = engine.step()
        except RuntimeError:
            failures += 1
            outputs = []
        engine.check_integrity()
        for output in outputs:
            said[output.request_id].extend(output.tokens)
    assert failures == 2
    assert said == {name: alone[name][:max_tokens] for name in names}
    assert engine.stats().used_pages == 0


def test_requests_of_a_failed_step_can_be_cancelled(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    engine.submit(ask("r", some_tokens(50)))
    monkeypatch.setattr(Runner, "launch", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.cancel("r")
    assert engine.step() == [StepOutput("r", finish="cancelled")]
    assert not engine.has_work
    assert engine.stats().used_pages == engine.stats().cached_pages == 0


POISON = SamplingParams(temperature=0.5, frequency_penalty=0.625)
"""Marks the request at fault for the injected faults below."""


def run_with_worker(engine: Engine, requests: list[EngineRequest]) -> tuple[dict[str, list[int]], list[str]]:
    """The response to each request and the blamed requests, if failed steps are handled like in a worker."""
    said: dict[str, list[int]] = {request.id: [] for request in requests}
    blamed = []
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        outputs = []
        try:
            outputs = engine.step()
        except FaultyRequest as error:
            blamed.append(error.request_id)
            engine.cancel(error.request_id)
        except OverflowError:
            assert engine.isolate()
        engine.check_integrity()
        for output in outputs:
            said[output.request_id].extend(output.tokens)
    assert engine.stats().used_pages == engine.stats().running == engine.stats().waiting == 0
    return said, blamed


def batch_with_poison(*places: int) -> list[EngineRequest]:
    requests = mixed_batch()
    for count, place in enumerate(places):
        requests.insert(place, ask(f"poison {count}", some_tokens(45, seed=8 + count), 9, POISON))
    return requests


@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_cannot_be_assigned_end_only_their_own_request(
    make_engine: EngineMaker, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    assign = Sampler.assign

    def failing(sampler: Sampler, row: int, request: EngineRequest, drawn: Any = ()) -> None:
        if request.sampling is POISON:
            raise OverflowError("int too big to convert")
        assign(sampler, row, request, drawn)

    monkeypatch.setattr(Sampler, "assign", failing)
    said, blamed = run_with_worker(make_engine(late=late, max_num_seqs=12), batch_with_poison(0, 4))
    assert sorted(blamed) == ["poison 0", "poison 1"]
    assert said == alone | {"poison 0": [], "poison 1": []}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "changes", [{"max_num_seqs": 12}, {"prefill_chunk_tokens": 33}, {"pages": 8, "max_num_seqs": 3}], ids=str
)
def test_failed_draw_ends_only_its_own_request(
    make_engine: EngineMaker,
    alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
    late: bool,
) -> None:
    """The fault is raised in a step of many requests, without naming the one at fault."""
    draw, poisoned = Sampler.draw, float(POISON.frequency_penalty)

    def failing(sampler: Sampler, logits: Any, draws: Any, rows: Any) -> Any:
        frequencies = sampler.tables.options[rows, number(FREQUENCY)].to(torch.int32).view(torch.float32)
        if (frequencies == poisoned).any():
            raise OverflowError("int too big to convert")
        return draw(sampler, logits, draws, rows)

    monkeypatch.setattr(Sampler, "draw", failing)
    said, blamed = run_with_worker(make_engine(late=late, **changes), batch_with_poison(1, 6))
    assert sorted(blamed) == ["poison 0", "poison 1"]
    assert said == alone | {"poison 0": [], "poison 1": []}


def test_failed_self_test_blames_no_request(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def failing(*_: Any, **__: Any) -> Any:
        raise OverflowError("the model is at fault")

    monkeypatch.setattr(Sampler, "draw", failing)
    engine.submit(ask("r", some_tokens(20)))
    with pytest.raises(OverflowError):
        engine.step()
    with pytest.raises(OverflowError):
        engine.isolate()
    engine.check_integrity()
    engine.cancel("r")
    assert engine.step() == [StepOutput("r", finish="cancelled")]
    assert not engine.isolate()
    assert engine.stats().used_pages == 0


def test_huge_integers_are_cut_to_the_vocabulary_and_context(make_engine: EngineMaker) -> None:
    huge = SamplingParams(
        temperature=0.8, seed=2**70, top_k=2**70, repetition_window=2**70, repetition_penalty=1.2, top_logprobs=2**70
    )
    all_of_them = replace(huge, top_k=0, repetition_window=0, top_logprobs=VOCAB)
    odd = {"min_tokens": 2**70, "stop_token_ids": (2**70, -(2**70))}
    outputs = run(
        make_engine(),
        ask("huge", (1, 2, 3), 6, huge, **odd),
        ask("all of them", (1, 2, 3), 6, all_of_them),
    )
    assert tokens_of(outputs["huge"]) == tokens_of(outputs["all of them"])
    assert len(outputs["huge"][0].logprobs[0].top_ids) == VOCAB
