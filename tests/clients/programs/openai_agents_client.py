"""OpenAI's agents SDK with its Responses model, which is the default, and its chat model."""

from functools import partial
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from report import FOR_JSON, GREETING, KEY, MODEL, QUESTION, RESULT, URL, WEATHER, Weather, equal, report

set_tracing_disabled(True)
kinds = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


def agent(kind: str, **options: Any) -> Agent:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return Agent(name="Tester", model=kinds[kind](MODEL, openai_client=client), **options)


async def chat(kind: str) -> None:
    equal((await Runner.run(agent(kind), QUESTION)).final_output, GREETING)


async def stream(kind: str) -> None:
    running = Runner.run_streamed(agent(kind), QUESTION)
    pieces = [
        event.data.delta
        async for event in running.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    equal("".join(pieces), GREETING)


async def tool_round_trip(kind: str) -> None:
    calls = []

    @function_tool
    def get_weather(city: str, days: int) -> str:
        """The weather of a city."""
        calls.append((city, days))
        return "sunny"

    equal((await Runner.run(agent(kind, tools=[get_weather]), QUESTION)).final_output, RESULT)
    equal(calls, [(WEATHER.city, WEATHER.days)])


async def structured(kind: str) -> None:
    equal((await Runner.run(agent(kind, output_type=Weather), FOR_JSON)).final_output, WEATHER)


async def second_turn() -> None:
    first = await Runner.run(agent("responses"), QUESTION)
    second = await Runner.run(agent("responses"), "Again.", previous_response_id=first.last_response_id)
    equal(second.final_output, GREETING)


tasks = {"chat": chat, "stream": stream, "tools": tool_round_trip, "structured": structured}
report(
    {f"{kind}: {what}": partial(task, kind) for kind in kinds for what, task in tasks.items()}
    | {"responses: second turn": second_turn}
)
