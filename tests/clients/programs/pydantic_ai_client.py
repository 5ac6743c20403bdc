"""Pydantic AI with its OpenAI models: chat and Responses."""

from functools import partial
from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import FOR_JSON, GREETING, KEY, MODEL, QUESTION, RESULT, URL, WEATHER, Weather, equal, report

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
models: dict[str, Any] = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
}


async def chat(model: Any) -> None:
    equal((await Agent(model).run(QUESTION)).output, GREETING)


async def stream(model: Any) -> None:
    async with Agent(model).run_stream(QUESTION) as result:
        equal("".join([piece async for piece in result.stream_text(delta=True)]), GREETING)


async def tool_round_trip(model: Any) -> None:
    calls = []

    def get_weather(city: str, days: int) -> str:
        calls.append((city, days))
        return "sunny"

    equal((await Agent(model, tools=[get_weather]).run(QUESTION)).output, RESULT)
    equal(calls, [(WEATHER.city, WEATHER.days)])


async def structured(model: Any) -> None:
    equal((await Agent(model, output_type=ToolOutput(Weather, name="final_result")).run(QUESTION)).output, WEATHER)


async def native(model: Any) -> None:
    equal((await Agent(model, output_type=NativeOutput(Weather)).run(FOR_JSON)).output, WEATHER)


async def server_side_state(model: Any) -> None:
    agent = Agent(model, model_settings={"openai_previous_response_id": "auto"})
    first = await agent.run(QUESTION)
    equal((await agent.run("Again.", message_history=first.all_messages())).output, GREETING)


tasks = {
    "chat": chat,
    "stream": stream,
    "tools": tool_round_trip,
    "structured": structured,
    "native structured": native,
}
report(
    {f"{name}: {what}": partial(task, model) for name, model in models.items() for what, task in tasks.items()}
    | {"responses: server-side state": partial(server_side_state, models["responses"])}
)
