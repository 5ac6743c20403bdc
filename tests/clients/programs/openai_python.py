"""The official OpenAI SDK for Python."""

import json

import openai
from report import FOR_JSON, GREETING, KEY, MODEL, QUESTION, RESULT, SCHEMA, URL, WEATHER, Weather, equal, report

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": QUESTION}]
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def chat() -> None:
    equal(client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content, GREETING)


def stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=messages) as events:
        equal(events.get_final_completion().choices[0].message.content, GREETING)


def tool_round_trip() -> None:
    message = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
    (call,) = message.tool_calls
    equal(json.loads(call.function.arguments), WEATHER.model_dump())
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    said = client.chat.completions.create(model=MODEL, messages=[*messages, message, result], tools=tools)
    equal(said.choices[0].message.content, RESULT)


def structured() -> None:
    asked = [{"role": "user", "content": FOR_JSON}]
    said = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Weather)
    equal(said.choices[0].message.parsed, WEATHER)


def responses_stream() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION) as events:
        kinds = [event.type for event in events]
        equal(events.get_final_response().output_text, GREETING)
    equal((kinds[0], kinds[-1]), ("response.created", "response.completed"))


def responses_tools() -> None:
    function = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    first = client.responses.create(model=MODEL, input=QUESTION, tools=[function])
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(model=MODEL, input=[output], tools=[function], previous_response_id=first.id)
    equal(second.output_text, RESULT)


def responses_structured() -> None:
    equal(client.responses.parse(model=MODEL, input=FOR_JSON, text_format=Weather).output_parsed, WEATHER)


def responses_state() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION)
    equal(client.responses.retrieve(first.id).output, first.output)
    equal(len(client.responses.input_items.list(first.id).data), 1)
    equal(client.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens, first.usage.input_tokens)
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


def responses_background() -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, background=True)
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    equal((response.status, response.output_text), ("completed", GREETING))
    stream = client.responses.create(model=MODEL, input=QUESTION, background=True, stream=True)
    events = list(stream)
    with client.responses.retrieve(events[-1].response.id, stream=True, starting_after=1) as resumed:
        equal([event.sequence_number for event in resumed], [event.sequence_number for event in events[2:]])


report(
    {
        "chat": chat,
        "stream": stream,
        "tools": tool_round_trip,
        "structured": structured,
        "responses: stream": responses_stream,
        "responses: tools": responses_tools,
        "responses: structured": responses_structured,
        "responses: state": responses_state,
        "responses: background": responses_background,
    }
)
