"""Instructor: objects by forced tools and by JSON schema, whole and streamed, with both vendors' clients.

Without a model of the response it hands on chats and tools.
"""

import json
from typing import Any

import anthropic
import instructor
import openai
from report import FOR_JSON, GREETING, KEY, MODEL, QUESTION, RESULT, SCHEMA, URL, WEATHER, Weather, equal, report

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
tools = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
claude = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0))


def ask(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_retries": 0}


def same(found: Weather) -> None:
    equal(found.model_dump(), WEATHER.model_dump())


def chat() -> None:
    equal(tools.chat.completions.create(response_model=None, **ask("Hello")).choices[0].message.content, GREETING)


def tool_round_trip() -> None:
    offered = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    request = ask(QUESTION) | {"tools": offered}
    message = tools.chat.completions.create(response_model=None, **request).choices[0].message
    (call,) = message.tool_calls
    equal(json.loads(call.function.arguments), WEATHER.model_dump())
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    request["messages"] += [message.model_dump(exclude_none=True) | {"content": message.content}, result]
    equal(tools.chat.completions.create(response_model=None, **request).choices[0].message.content, RESULT)


def by_tool() -> None:
    same(tools.chat.completions.create(response_model=Weather, **ask(QUESTION)))


def by_schema() -> None:
    same(schema.chat.completions.create(response_model=Weather, **ask(FOR_JSON)))


def streamed() -> None:
    partials = list(tools.chat.completions.create_partial(response_model=Weather, **ask(QUESTION)))
    same(partials[-1])


def by_anthropic() -> None:
    same(claude.chat.completions.create(response_model=Weather, max_tokens=500, **ask(QUESTION)))


report(
    {
        "chat": chat,
        "tools": tool_round_trip,
        "structured by tool": by_tool,
        "structured by schema": by_schema,
        "stream": streamed,
        "anthropic": by_anthropic,
    }
)
