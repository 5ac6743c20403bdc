"""LiteLLM as a client, with its OpenAI, Anthropic and Ollama routes and its Responses API."""

import json
from functools import partial
from typing import Any

import litellm
from report import FOR_JSON, GREETING, KEY, MODEL, QUESTION, RESULT, SCHEMA, URL, WEATHER, Weather, equal, report

litellm.suppress_debug_info = True
routes: dict[str, dict[str, Any]] = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "max_tokens": 500, "max_retries": 0},
    "ollama": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
}
messages = [{"role": "user", "content": QUESTION}]
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def chat(route: dict[str, Any]) -> None:
    equal(litellm.completion(messages=messages, **route).choices[0].message.content, GREETING)


def stream(route: dict[str, Any]) -> None:
    chunks = litellm.completion(messages=messages, stream=True, **route)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), GREETING)


def tool_round_trip(route: dict[str, Any]) -> None:
    message = litellm.completion(messages=messages, tools=tools, **route).choices[0].message
    (call,) = message.tool_calls
    equal(json.loads(call.function.arguments), WEATHER.model_dump())
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    said = litellm.completion(messages=[*messages, message.model_dump(), result], tools=tools, **route)
    equal(said.choices[0].message.content, RESULT)


def structured(route: dict[str, Any]) -> None:
    asked = [{"role": "user", "content": FOR_JSON}]
    said = litellm.completion(messages=asked, response_format=Weather, **route)
    equal(Weather.model_validate_json(said.choices[0].message.content), WEATHER)


def overflow(route: dict[str, Any]) -> None:
    """LiteLLM recognises an overflow by its words."""
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 200_000}], **route)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("the overflow was not recognised")


def responses() -> None:
    first = litellm.responses(input=QUESTION, **routes["openai"])
    second = litellm.responses(input="Again.", previous_response_id=first.id, **routes["openai"])
    equal(second.output[-1].content[0].text, GREETING)


tasks = {"chat": chat, "stream": stream, "tools": tool_round_trip, "structured": structured, "overflow": overflow}
report(
    {
        f"{name}: {what}": partial(task, route)
        for name, route in routes.items()
        for what, task in tasks.items()
        if (name, what) != ("ollama", "overflow")  # which it does not recognise there
    }
    | {"responses": responses}
)
