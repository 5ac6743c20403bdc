"""Ollama's own Python package."""

import ollama
from report import FOR_JSON, GREETING, MODEL, QUESTION, RESULT, SCHEMA, URL, WEATHER, Weather, equal, report

client = ollama.Client(host=URL)
messages = [{"role": "user", "content": QUESTION}]
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def chat() -> None:
    said = client.chat(model=f"{MODEL}:latest", messages=messages, keep_alive=-1, options={"num_ctx": 4096})
    equal(said.message.content, GREETING)
    parts = said.load_duration + said.prompt_eval_duration + said.eval_duration
    equal(abs(said.total_duration - parts) < 10 and said.eval_duration > 0, True)
    equal((said.done_reason, said.prompt_eval_count > 0, said.eval_count > 0), ("stop", True, True))


def stream() -> None:
    pieces = list(client.chat(model=MODEL, messages=messages, stream=True))
    equal("".join(piece.message.content for piece in pieces), GREETING)
    equal([piece.done for piece in pieces], [False] * (len(pieces) - 1) + [True])


async def stream_later() -> None:
    pieces = [piece async for piece in await ollama.AsyncClient(host=URL).chat(MODEL, messages, stream=True)]
    equal("".join(piece.message.content for piece in pieces), GREETING)


def tool_round_trip() -> None:
    first = client.chat(model=MODEL, messages=messages, tools=tools).message
    (call,) = first.tool_calls
    equal(call.function.arguments, WEATHER.model_dump())
    result = {"role": "tool", "tool_name": call.function.name, "content": "sunny"}
    equal(client.chat(model=MODEL, messages=[*messages, first, result], tools=tools).message.content, RESULT)


def structured() -> None:
    asked = [{"role": "user", "content": FOR_JSON}]
    said = client.chat(model=MODEL, messages=asked, format=Weather.model_json_schema())
    equal(Weather.model_validate_json(said.message.content), WEATHER)


def generate() -> None:
    equal(client.generate(model=MODEL, prompt=QUESTION).response, GREETING)
    pieces = client.generate(model=MODEL, prompt=QUESTION, stream=True)
    equal("".join(piece.response for piece in pieces), GREETING)
    equal(client.generate(model=MODEL).done_reason, "load")


def listings() -> None:
    (listed,) = (each for each in client.list().models if each.model == MODEL)
    equal((listed.size > 0, len(listed.digest)), (True, 64))
    (loaded,) = (each for each in client.ps().models if each.name == MODEL)
    equal((loaded.size > 0, loaded.size_vram, loaded.digest), (True, 0, listed.digest))
    shown = client.show(MODEL)
    equal("completion" in shown.capabilities, True)
    equal(shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] > 0, True)


def errors() -> None:
    for call in (
        lambda: client.chat(model="other", messages=messages),
        lambda: list(client.chat(model="other", messages=messages, stream=True)),
        lambda: client.show("other"),
        lambda: client.delete("other"),
    ):
        try:
            call()
        except ollama.ResponseError as error:
            equal((error.status_code, "There is no model `other`" in error.error), (404, True))
        else:
            raise AssertionError("no error")
    try:
        client.create(model="x", from_=MODEL)
    except ollama.ResponseError as error:
        equal(error.status_code, 501)


report(
    {
        "chat": chat,
        "stream": stream,
        "stream, asynchronous": stream_later,
        "tools": tool_round_trip,
        "structured": structured,
        "generate": generate,
        "listings": listings,
        "errors": errors,
    }
)
