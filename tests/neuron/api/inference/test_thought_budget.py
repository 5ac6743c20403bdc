"""A budget for thinking: the thought ends there, the answer follows, and nothing depends on how the tokens arrived."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from cortex.neuron.api.inference.thought_budget import submit
from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import Rendered
from cortex.wire.requests import GenerateRequest, Message, OutputFormat, Text, Thinking

THOUGHT = "Let me see whether this goes on for ever and ever. "
ANSWER = "Forty-two."


class Engine:
    """Says `THOUGHT` without end, and `ANSWER` once the prompt ends with a closed thought. Cuts batches at random."""

    def __init__(self, text: TextModel, *, closes: bool = False, seed: int = 0) -> None:
        self.text = text
        self.closes = closes
        self.jobs: list[EngineRequest] = []
        self.num_cancelled = 0
        self._random = random.Random(seed)

    def submit(self, model_id: str, job: EngineRequest) -> Engine.Run:
        assert model_id == "m"
        self.jobs.append(job)
        return Engine.Run(self, job)

    class Run:
        def __init__(self, engine: Engine, job: EngineRequest) -> None:
            self.engine = engine
            self.job = job

        def cancel(self) -> None:
            self.engine.num_cancelled += 1

        async def __aiter__(self) -> AsyncIterator[list[StepOutput]]:
            engine, job = self.engine, self.job
            answers = engine.text.decode(job.prompt).endswith("</think>\n\n")
            says = ANSWER if answers else THOUGHT * (1 if engine.closes else 100)
            if engine.closes and not answers:
                says += f"\n</think>\n\n{ANSWER}"
            ids = engine.text.encode(says)[: job.max_tokens]
            while ids:
                sizes = [engine._random.randint(1, 5) for _ in range(engine._random.randint(1, 3))]
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


async def run(engine: Engine, asked: GenerateRequest, max_tokens: int = 1000) -> tuple[str, str | None]:
    job = EngineRequest("r", (1, 2), max_tokens)
    rendered = Rendered("<think>\n", (1, 2), (), starts_in_reasoning=True)
    outputs = [output async for batch in submit(engine, engine.text, asked, rendered, job) for output in batch]  # type: ignore[arg-type]
    return engine.text.decode(itertools.chain(*(output.tokens for output in outputs))), outputs[-1].finish


@pytest.mark.parametrize("budget_tokens", [1, 7, 64])
async def test_the_thought_is_closed_where_its_budget_ends_and_the_answer_follows(
    text: TextModel, budget_tokens: int
) -> None:
    thought = text.decode(text.encode(THOUGHT * 9)[:budget_tokens])
    for seed in range(10):
        engine = Engine(text, seed=seed)
        assert await run(engine, request(budget_tokens)) == (f"{thought}\n</think>\n\n{ANSWER}", "stop")
        first, second = engine.jobs
        assert second.prompt == (*first.prompt, *text.encode(f"{thought}\n</think>\n\n"))
        assert first.max_tokens == second.max_tokens + len(second.prompt) - len(first.prompt)
        assert second.id != first.id
        assert engine.num_cancelled == 1


async def test_a_thought_within_its_budget_is_left_alone(text: TextModel) -> None:
    engine = Engine(text, closes=True)
    assert await run(engine, request(200)) == (f"{THOUGHT}\n</think>\n\n{ANSWER}", "stop")
    assert len(engine.jobs) == 1


async def test_no_room_for_an_answer_is_an_answer_cut_short(text: TextModel) -> None:
    said, finish = await run(Engine(text), request(20), max_tokens=22)
    assert (said.endswith("\n</think>\n\n"), finish) == (True, "length")


async def test_an_answer_in_a_form_is_held_to_it_after_the_cut_too(text: TextModel) -> None:
    engine = Engine(text)
    asked = request(20, output=OutputFormat(kind="choice", choices=("Forty-two.",)))
    await run(engine, asked)
    assert engine.jobs[1].grammar == text.response_grammar(asked)
    assert engine.jobs[1].grammar is not None


async def test_without_a_budget_or_a_thought_nothing_is_watched(text: TextModel) -> None:
    for thinking in (Thinking(enabled=True), Thinking(enabled=False, budget_tokens=5)):
        engine = Engine(text)
        asked = GenerateRequest(model="m", messages=request(1).messages, thinking=thinking)
        await run(engine, asked, max_tokens=40)
        assert len(engine.jobs) == 1


async def test_the_anthropic_sdk_gets_a_short_thought_and_an_answer(api: Any) -> None:
    api.node.play.says = THOUGHT * 100
    client = anthropic.AsyncAnthropic(api_key="k", base_url=api.url, max_retries=0)
    async with client.messages.stream(
        model="org/tiny",
        max_tokens=60,
        thinking={"type": "enabled", "budget_tokens": 10},
        messages=[{"role": "user", "content": "hello"}],
    ) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == THOUGHT[:10]
    assert message.content[1].text.startswith(THOUGHT[:20])
    assert message.usage.output_tokens == 60
    assert message.stop_reason == "max_tokens"
