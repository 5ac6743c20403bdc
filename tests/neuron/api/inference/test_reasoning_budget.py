"""The thinking budget: reasoning ends there and the answer follows, however the tokens are batched."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import anthropic
import pytest
from anthropic.types import TextBlock, ThinkingBlock

from cortex.neuron.api.inference.session import generate_within_budget
from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.node.node import Node
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import prepare
from cortex.neuron.text.template.prompt import NO_RULES, Rendered
from cortex.wire.requests import GenerateRequest, Message, OutputFormat, Text, Thinking

from ...generations import PlayedGeneration, Reader

THOUGHT = "Let me see whether this goes on for ever and ever. "
ANSWER = "Forty-two."


class Engine:
    """Generates `THOUGHT` without end, and `ANSWER` after a prompt with closed reasoning. Batches are random."""

    def __init__(self, text: TextModel, *, closes: bool = False, seed: int = 0) -> None:
        self.text = text
        self.closes = closes
        self.jobs: list[EngineRequest] = []
        self.num_cancelled = 0
        self.random = random.Random(seed)

    def generate(self, model_id: str, job: EngineRequest) -> Engine.Run:
        assert model_id == "m"
        self.jobs.append(job)
        return Engine.Run(self, job)

    class Run(PlayedGeneration):
        def __init__(self, engine: Engine, job: EngineRequest) -> None:
            super().__init__(self.outputs(engine, job))
            self.engine = engine

        queued_s = energy_j = 0.0

        def cancel(self) -> None:
            self.engine.num_cancelled += 1

        async def outputs(self, engine: Engine, job: EngineRequest) -> AsyncIterator[list[StepOutput]]:
            answers = engine.text.decode(job.prompt).endswith("</think>\n\n")
            output = ANSWER if answers else THOUGHT * (1 if engine.closes else 100)
            if engine.closes and not answers:
                output += f"\n</think>\n\n{ANSWER}"
            ids = engine.text.encode(output)[: job.max_tokens]
            while ids:
                sizes = [engine.random.randint(1, 5) for _ in range(engine.random.randint(1, 3))]
                batch = []
                for size in sizes:
                    tokens, ids = tuple(ids[:size]), ids[size:]
                    if tokens:
                        batch.append(StepOutput(job.id, tokens, finish=None if ids else "stop"))
                yield batch


def request(budget_tokens: int, **fields: Any) -> GenerateRequest:
    thinking = Thinking(enabled=True, budget_tokens=budget_tokens)
    return GenerateRequest(
        model="m", messages=(Message(role="user", parts=(Text(text="hi"),)),), thinking=thinking, **fields
    )


async def run(
    engine: Engine, generate_request: GenerateRequest, max_tokens: int = 1000, grammar: str | None = None
) -> tuple[str, str | None]:
    job = EngineRequest("r", (1, 2), max_tokens)
    rendered = Rendered("<think>\n", (1, 2), (), starts_in_reasoning=True)
    backend = cast(Node, engine)  # `submit` uses nothing else of it
    stream = generate_within_budget(backend, engine.text, generate_request, rendered, job, grammar)
    outputs = [output async for batch in Reader(stream) for output in batch]
    return engine.text.decode(itertools.chain(*(output.tokens for output in outputs))), outputs[-1].finish


@pytest.mark.parametrize("budget_tokens", [1, 7, 64])
async def test_ends_reasoning_at_its_budget_and_continues_with_the_answer(text: TextModel, budget_tokens: int) -> None:
    thought = text.decode(text.encode(THOUGHT * 9)[:budget_tokens])
    for seed in range(10):
        engine = Engine(text, seed=seed)
        assert await run(engine, request(budget_tokens)) == (f"{thought}\n</think>\n\n{ANSWER}", "stop")
        first, second = engine.jobs
        assert second.prompt == (*first.prompt, *text.encode(f"{thought}\n</think>\n\n"))
        assert first.max_tokens == second.max_tokens + len(second.prompt) - len(first.prompt)
        assert second.id != first.id
        assert engine.num_cancelled == 1


async def test_does_not_cut_reasoning_within_its_budget(text: TextModel) -> None:
    engine = Engine(text, closes=True)
    assert await run(engine, request(200)) == (f"{THOUGHT}\n</think>\n\n{ANSWER}", "stop")
    assert len(engine.jobs) == 1


async def test_finishes_with_length_when_no_tokens_are_left_for_the_answer(text: TextModel) -> None:
    said, finish = await run(Engine(text), request(20), max_tokens=22)
    assert (said.endswith("\n</think>\n\n"), finish) == (True, "length")
    assert len(text.encode(said)) == 22, "the end marker counts"


async def test_applies_the_output_grammar_after_the_cut(text: TextModel) -> None:
    engine = Engine(text)
    generate_request = request(20, output=OutputFormat(kind="choice", choices=("Forty-two.",)))
    prepared = prepare(text, generate_request, NO_RULES)
    assert prepared.response_grammar is not None
    assert prepared.response_grammar != prepared.grammar
    await run(engine, generate_request, grammar=prepared.response_grammar)
    assert engine.jobs[1].grammar == prepared.response_grammar


async def test_submits_one_sequence_without_budget_or_reasoning(text: TextModel) -> None:
    for thinking in (Thinking(enabled=True), Thinking(enabled=False, budget_tokens=5)):
        engine = Engine(text)
        generate_request = GenerateRequest(model="m", messages=request(1).messages, thinking=thinking)
        await run(engine, generate_request, max_tokens=40)
        assert len(engine.jobs) == 1


async def test_anthropic_sdk_gets_reasoning_within_budget_and_an_answer(api: Any) -> None:
    api.node.script.text = THOUGHT * 100
    client = anthropic.AsyncAnthropic(api_key="k", base_url=api.url, max_retries=0)
    async with client.messages.stream(
        model="org/tiny",
        max_tokens=60,
        thinking={"type": "enabled", "budget_tokens": 10},
        messages=[{"role": "user", "content": "hello"}],
    ) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    thought, answer = message.content
    assert isinstance(thought, ThinkingBlock)
    assert isinstance(answer, TextBlock)
    assert thought.thinking == THOUGHT[:10]
    assert answer.text.startswith(THOUGHT[:20])
    assert message.usage.output_tokens == 60
    assert message.stop_reason == "max_tokens"
