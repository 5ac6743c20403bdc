"""What agents do, with the official clients: tools in a loop, streams of every dialect, on our engine and elsewhere."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..neuron.tiny_models import llama_config, llama_weights, write_checkpoint
from ..waiting import WAIT_S, wait_until
from .foreign_server import CONTEXT_TOKENS, KEY, ForeignServer

if TYPE_CHECKING:
    from .conftest import Run, Start

pytestmark = pytest.mark.e2e

TEMPLATES = Path(__file__).parents[1] / "neuron" / "text" / "templates"
TEMPLATE_BY_MODEL = {"hermes-calls": "qwen3.jinja", "xml-calls": "qwen_xml.jinja"}
NATIVE = tuple(TEMPLATE_BY_MODEL)
FOREIGN = "org/agent"
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Bergen"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", **FUNCTION, "strict": False}]
MESSAGES_TOOLS: list[Any] = [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}]


def write_model(folder: Path, template: str) -> Path:
    """A random model of single bytes with a real template: it writes nonsense, and calls whatever it is made to."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    whole = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {"eos_token": "<|im_end|>", "chat_template": (TEMPLATES / template).read_text()}
    (folder / "tokenizer_config.json").write_text(json.dumps(text))
    model_config = llama_config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
    )
    weights = llama_weights(model_config)
    weights["lm_head.weight"][len(alphabet) :] = 0  # markers are never the top token
    return write_checkpoint(folder, model_config, weights)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ForeignServer]:
    server = ForeignServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def fleet(start: Start, elsewhere: ForeignServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two models of our own that know tools, and a server elsewhere that speaks only OpenAI chat."""
    folder = tmp_path_factory.mktemp("fleet")
    config = folder / "cortex.toml"
    config.write_text(
        f'[[neurons]]\nname = "elsewhere"\nkind = "openai"\n'
        f'key_env = "ELSEWHERE_KEY"\nendpoint = "{elsewhere.url}/v1"\n'
    )
    (folder / "models.toml").write_text(f'[aliases]\n"claude-*" = "{FOREIGN}"\nweather = "{NATIVE[0]}"\n')
    written = [write_model(folder / name, file) for name, file in TEMPLATE_BY_MODEL.items()]
    # It computes on as many threads as a user's run does; other runs take one where the suite itself runs in parallel.
    threads = str(os.cpu_count())
    run = start(*map(str, written), "--config", str(config), ELSEWHERE_KEY=KEY, OMP_NUM_THREADS=threads)
    run.wait_ready()
    return run


@pytest.fixture(scope="module")
def chat(fleet: Run) -> openai.OpenAI:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="any", max_retries=0, timeout=WAIT_S)
    wait_until(lambda: FOREIGN in {model.id for model in client.models.list()}, "the foreign server never joined")
    return client


@pytest.fixture(scope="module")
def messages(fleet: Run, chat: openai.OpenAI) -> anthropic.Anthropic:
    assert chat
    return anthropic.Anthropic(base_url=fleet.url, api_key="any", max_retries=0, timeout=WAIT_S)


def check(arguments: dict[str, Any]) -> None:
    assert arguments["city"] in ("Oslo", "Bergen")
    assert 1 <= arguments["days"] <= 3


@pytest.mark.parametrize("model", [*NATIVE, FOREIGN])
def test_chat_completions_with_tools_in_a_loop(chat: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {
        "model": model,
        "tools": CHAT_TOOLS,
        "max_completion_tokens": 600,
        "reasoning_effort": "none",
        "parallel_tool_calls": False,
    }
    with chat.chat.completions.stream(messages=QUESTION, tool_choice="required", **options) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        said = stream.get_final_completion().choices[0]
    assert said.finish_reason == "tool_calls"
    assert said.message.tool_calls is not None
    (call,) = said.message.tool_calls
    assert call.function.name == "get_weather"
    check(json.loads(call.function.arguments))
    assert "".join(piece.arguments_delta for piece in pieces) == call.function.arguments
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns: Any = [*QUESTION, said.message, result]
    again = chat.chat.completions.create(messages=turns, **{**options, "max_completion_tokens": 8})
    assert again.usage is not None
    assert again.usage.completion_tokens > 0
    if model == FOREIGN:
        assert again.choices[0].message.content == "The tool said: sunny"


@pytest.mark.parametrize("model", [*NATIVE, FOREIGN])
def test_messages_with_tools_in_a_loop(messages: anthropic.Anthropic, model: str) -> None:
    options: dict[str, Any] = {"model": model, "tools": MESSAGES_TOOLS, "thinking": {"type": "disabled"}}
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    with messages.messages.stream(messages=QUESTION, max_tokens=600, tool_choice=choice, **options) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        said = stream.get_final_message()
    assert said.stop_reason == "tool_use"
    call = said.content[-1]
    assert isinstance(call, ToolUseBlock)
    check(call.input)
    assert json.loads("".join(pieces)) == call.input
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*QUESTION, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    again = messages.messages.create(messages=turns, max_tokens=8, **options)
    assert again.usage.output_tokens > 0
    if model == FOREIGN:
        assert [block.type for block in said.content] == ["text", "tool_use"]  # this server thinks all the same
        assert again.content[-1].text == "The tool said: sunny"
        assert (again.usage.input_tokens, again.usage.cache_read_input_tokens) == (3, 4)


@pytest.mark.parametrize("model", [*NATIVE, FOREIGN])
def test_responses_with_tools_in_a_loop(chat: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {
        "model": model,
        "tools": RESPONSES_TOOLS,
        "reasoning": {"effort": "none"},
        "store": False,
    }
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    events = list(
        chat.responses.create(
            input=asked,
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=600,
            stream=True,
            **options,
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    said = events[-1].response
    call = said.output[-1]
    check(json.loads(call.arguments))
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = chat.responses.create(input=[*asked, *said.output, result], max_output_tokens=8, **options)
    assert again.usage is not None
    assert again.usage.output_tokens > 0
    if model == FOREIGN:
        assert [item.type for item in said.output] == ["reasoning", "message", "function_call"]
        assert again.output_text == "The tool said: sunny"


def test_reasoning_ends_at_its_budget(messages: anthropic.Anthropic) -> None:
    """The template of this model opens the thought, which the random model would hardly ever close."""
    response = messages.messages.create(
        model="xml-calls",
        messages=QUESTION,
        max_tokens=60,
        thinking={"type": "enabled", "budget_tokens": 20},
        extra_body={"temperature": 0},
    )
    thought, said = response.content
    assert (thought.type, said.type) == ("thinking", "text")
    assert isinstance(thought, ThinkingBlock)
    assert len(thought.thinking) <= 20
    assert (response.stop_reason, response.usage.output_tokens) == ("max_tokens", 60)


def test_embeddings_come_from_a_server_that_makes_them(chat: openai.OpenAI) -> None:
    made = chat.embeddings.create(model="org/embedder", input=["a", "b"])
    assert [item.embedding for item in made.data] == [[0.5, 0.0], [0.5, 1.0]]
    with pytest.raises(openai.BadRequestError) as rejection:
        chat.embeddings.create(model=NATIVE[0], input="a")
    assert rejection.value.code == "unsupported_modality"


def test_aliases_lead_to_models_wherever_they_are(chat: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    response = messages.messages.create(model="claude-sonnet-9", messages=QUESTION, max_tokens=8)
    said = response.content[-1]
    assert isinstance(said, TextBlock)
    assert said.text == "Hello."
    assert chat.chat.completions.create(model="weather", messages=QUESTION, max_tokens=2).model == NATIVE[0]


def test_one_list_of_models_for_both_clients(chat: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    listed = {model.id: model.model_dump() for model in chat.models.list()}
    assert {*NATIVE, FOREIGN, "org/embedder", "weather"} == set(listed)
    assert {model.id for model in messages.models.list()} == set(listed)
    assert listed[FOREIGN]["locations"] == [{"node": "elsewhere", "status": "ready", "vram_mb": 0}]
    assert listed[FOREIGN]["limit"]["context"] == CONTEXT_TOKENS
    assert messages.models.retrieve(FOREIGN).id == chat.models.retrieve(FOREIGN).id == FOREIGN
    assert chat.models.retrieve("claude-sonnet-9").model_dump()["alias_of"] == FOREIGN


def test_up_ends_with_one_line_if_the_neuron_dies(fleet: Run) -> None:
    """The last test of this file: no other needs this run."""
    os.kill(fleet.wait_for_program("neuron"), signal.SIGKILL)
    fleet.assert_one_line_fault("neuron", code=1)
