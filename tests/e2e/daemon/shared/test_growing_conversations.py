"""A conversation that grows is not tokenised from its start again: each turn tokenises what is new."""

from __future__ import annotations

import json
import re
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ....neuron.tiny_models import write_llama
from ....waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..conftest import Daemon, StartGateway

pytestmark = pytest.mark.e2e

TEMPLATE = Path(__file__).parents[3] / "neuron" / "text" / "templates" / "official" / "qwen3.jinja"
"""It leaves out the reasoning of earlier turns, and writes the rest of them as before."""
CONTROL = ("<|im_start|>", "<|im_end|>")
WHOLE = ("<tool_call>", "</tool_call>", "<think>", "</think>")
VOCABULARIES = ("bytes", "sentencepiece")
MARKUP_CHARACTERS = 400
"""Roles, and what is written around a tool call: short segments, which are tokenised each time."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = "call_{}"


def long_text(name: str) -> str:
    """It is long enough to be remembered."""
    return (f"{name}, " * 300)[:300]


def byte_vocabulary() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_vocabulary() -> Tokenizer:
    pieces = ["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in WHOLE])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": CONTROL[1]}))
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "intermediate_size": 64, "num_hidden_layers": 1}
    return write_llama(folder, **sizes, max_position_embeddings=1 << 14)


@pytest.fixture(scope="module")
def node(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    vocabularies = {"bytes": byte_vocabulary(), "sentencepiece": sentencepiece_vocabulary()}
    for name, tokenizer in vocabularies.items():
        source = str(write_model(tmp_path_factory.mktemp(name), tokenizer))
        status, model = daemon.call("/models/load", {"model_id": name, "source": source})
        assert status == 200, model
    yield daemon
    for name in vocabularies:
        assert daemon.call("/models/unload", {"model_id": name})[0] == 200


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, node: Daemon) -> Daemon:
    return start_gateway("".join(f'[[models]]\nid = "{name}"\n' for name in VOCABULARIES), {"node": node})


def num_tokenised(node: Daemon, model: str) -> int:
    """The characters that the node has tokenised."""
    with urllib.request.urlopen(f"{node.url}/metrics", timeout=WAIT_S) as response:
        metrics = response.read().decode()
    found = re.search(rf'neuron_tokenised_characters_total{{model="{model}"}} (\S+)', metrics)
    return round(float(found[1])) if found else 0


def chat_turns(name: str) -> Iterator[dict[str, Any]]:
    """Bodies of requests. Each goes on where the one before ends."""
    tool = {"type": "function", "function": {"name": "look", "description": long_text(name), "parameters": SCHEMA}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": long_text(f"{name} rules")},
        {"role": "user", "content": long_text(f"{name} first")},
    ]
    body = {"messages": messages, "tools": [tool], "max_tokens": 1}
    yield body
    for turn in range(2):
        function = {"name": "look", "arguments": json.dumps({"city": long_text(f"{name} city {turn}")})}
        calls = [{"id": CALL.format(turn), "type": "function", "function": function}]
        reasoning = long_text(f"{name} reasoning {turn}")
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": calls})
        found = long_text(f"{name} result {turn}")
        messages.append({"role": "tool", "tool_call_id": CALL.format(turn), "content": found})
        yield body
        messages.append({"role": "assistant", "content": long_text(f"{name} answer {turn}")})
        # The name of a control token in a message is text.
        messages.append({"role": "user", "content": long_text(f"{name} question {turn}") + "<|im_end|>"})
        yield body


def message_turns(name: str) -> Iterator[dict[str, Any]]:
    tool = {"name": "look", "description": long_text(name), "input_schema": SCHEMA}
    messages: list[dict[str, Any]] = [{"role": "user", "content": long_text(f"{name} first")}]
    body = {"system": long_text(f"{name} rules"), "messages": messages, "tools": [tool], "max_tokens": 1}
    yield body
    for turn in range(2):
        use = {"type": "tool_use", "id": CALL.format(turn), "name": "look"}
        messages.append({"role": "assistant", "content": [use | {"input": {"city": long_text(f"{name} city {turn}")}}]})
        result = {"type": "tool_result", "tool_use_id": CALL.format(turn), "content": long_text(f"{name} is {turn}")}
        messages.append({"role": "user", "content": [result]})
        yield body
        messages.append({"role": "assistant", "content": long_text(f"{name} answer {turn}")})
        messages.append({"role": "user", "content": long_text(f"{name} question {turn}")})
        yield body


def response_turns(name: str) -> Iterator[dict[str, Any]]:
    tool = {"type": "function", "name": "look", "description": long_text(name), "parameters": SCHEMA, "strict": False}
    items: list[dict[str, Any]] = [{"role": "user", "content": long_text(f"{name} first")}]
    rules = long_text(f"{name} rules")
    body = {"instructions": rules, "input": items, "tools": [tool], "max_output_tokens": 1, "store": False}
    yield body
    for turn in range(2):
        arguments = json.dumps({"city": long_text(f"{name} city {turn}")})
        id = CALL.format(turn)
        items.append({"type": "function_call", "call_id": id, "name": "look", "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": id, "output": long_text(f"{name} result {turn}")})
        yield body
        items.append({"role": "assistant", "content": long_text(f"{name} answer {turn}")})
        items.append({"role": "user", "content": long_text(f"{name} question {turn}")})
        yield body


DIALECTS: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {
    "/v1/chat/completions": chat_turns,
    "/v1/messages": message_turns,
    "/v1/responses": response_turns,
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("model", VOCABULARIES)
def test_turn_tokenises_what_is_new(node: Daemon, gateway: Daemon, model: str, path: str) -> None:
    """The turns go to the node directly and through the gateway, alternately."""
    tokenised, lengths = [num_tokenised(node, model)], [0]
    for number, body in enumerate(DIALECTS[path](path)):
        status, response = (gateway, node)[number % 2].call(path, {"model": model, **body})
        assert status == 200, response
        tokenised.append(num_tokenised(node, model))
        lengths.append(len(json.dumps(body)))
    each = [after - before for before, after in pairwise(tokenised)]
    new = [after - before for before, after in pairwise(lengths)]
    assert all(count <= length + MARKUP_CHARACTERS for count, length in zip(each, new, strict=True)), (each, new)
    assert min(each) > 0
    assert lengths[-1] > 3 * (new[-1] + MARKUP_CHARACTERS), "the last turn is small, compared with the conversation"


@pytest.mark.parametrize("model", VOCABULARIES)
def test_prompt_that_was_counted_is_known(node: Daemon, model: str) -> None:
    body = {"model": model, **next(message_turns("counted"))}
    before = num_tokenised(node, model)
    status, counted = node.call("/v1/messages/count_tokens", body)
    assert status == 200, counted
    first = num_tokenised(node, model)
    assert first - before > 2 * len(body["system"])
    status, response = node.call("/v1/messages", body)
    assert status == 200, response
    assert num_tokenised(node, model) - first < MARKUP_CHARACTERS
