"""The official Anthropic SDK for Python."""

import anthropic
from report import GREETING, KEY, MODEL, QUESTION, RESULT, SCHEMA, URL, WEATHER, equal, report

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": QUESTION}]
tools = [{"name": "get_weather", "input_schema": SCHEMA}]
options = {"model": MODEL, "max_tokens": 500}


def chat() -> None:
    equal(client.messages.create(messages=messages, **options).content[-1].text, GREETING)


def stream() -> None:
    with client.messages.stream(messages=messages, **options) as events:
        equal(events.get_final_text(), GREETING)


def tool_round_trip() -> None:
    called = client.messages.create(messages=messages, tools=tools, **options)
    call = called.content[-1]
    equal((called.stop_reason, call.input), ("tool_use", WEATHER.model_dump()))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*messages, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    equal(client.messages.create(messages=turns, tools=tools, **options).content[-1].text, RESULT)


def structured() -> None:
    choice = {"type": "tool", "name": "get_weather"}
    said = client.messages.create(messages=messages, tools=tools, tool_choice=choice, **options)
    equal(said.content[-1].input, WEATHER.model_dump())


def count() -> None:
    usage = client.messages.create(messages=messages, **options).usage
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    equal(counted, usage.input_tokens + usage.cache_read_input_tokens)


report({"chat": chat, "stream": stream, "tools": tool_round_trip, "structured": structured, "count": count})
