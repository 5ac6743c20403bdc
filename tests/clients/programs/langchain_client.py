"""LangChain with the chat models of OpenAI, in both APIs, of Anthropic and of Ollama."""

from functools import partial
from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from report import FOR_JSON, GREETING, KEY, MODEL, QUESTION, RESULT, URL, WEATHER, Weather, equal, report

models: dict[str, Any] = {
    "chat": ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0),
    "responses": ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, use_responses_api=True),
    "anthropic": ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, max_tokens=500),
    "ollama": ChatOllama(model=MODEL, base_url=URL, validate_model_on_init=True),
}


@tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"sunny in {city} for {days} days"


def text_of(message: Any) -> str:
    return str(message.text)


def chat(model: Any) -> None:
    equal(text_of(model.invoke(QUESTION)), GREETING)


def stream(model: Any) -> None:
    equal("".join(text_of(piece) for piece in model.stream(QUESTION)), GREETING)


def tool_round_trip(model: Any) -> None:
    agent = create_agent(model, [get_weather])
    messages = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
    equal([message.type for message in messages], ["human", "ai", "tool", "ai"])
    equal(messages[1].tool_calls[0]["args"], WEATHER.model_dump())
    equal(text_of(messages[-1]), RESULT)


def structured(model: Any) -> None:
    equal(model.with_structured_output(Weather).invoke(FOR_JSON), WEATHER)


tasks = {"chat": chat, "stream": stream, "tools": tool_round_trip, "structured": structured}
report({f"{name}: {what}": partial(task, model) for name, model in models.items() for what, task in tasks.items()})
