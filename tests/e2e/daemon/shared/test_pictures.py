"""Pictures from a client through a gateway and a real neuron to the tower of a model, in every dialect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.neuron.api.conftest import EOS, add_pictures, write_text_files
from tests.neuron.models.colour_namer import NAMES, colour_namer
from tokenizers import Tokenizer

from ....picture_files import animated, base64_of, data_url, picture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..conftest import Daemon, StartGateway

pytestmark = pytest.mark.e2e

MODEL = "seer"
SIDE = 32
"""Pixels to the side of a token."""


def write_model(folder: Path) -> Path:
    """A Qwen3.5 with a tower that names colours, and a tokenizer of single bytes."""
    folder.mkdir()
    write_text_files(folder)
    add_pictures(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    colour_namer(tokenizer, SIDE // 2, EOS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gateway(daemon: Daemon, start_gateway: StartGateway, tiny_model: Path) -> Iterator[Daemon]:
    folder = write_model(tiny_model.with_name("seer"))
    load = {"model_id": MODEL, "source": str(folder), "wait": True}
    status, loaded = daemon.call("/models/load", load)
    assert status == 200, loaded
    assert loaded["capabilities"]["vision"], loaded
    yield start_gateway("", {"beast": daemon})
    daemon.call("/models/unload", {"model_id": MODEL})


def asking(path: str, *files: bytes) -> dict[str, Any]:
    common: dict[str, Any] = {"model": MODEL, "temperature": 0, "seed": 1}
    if path == "/v1/responses":
        parts: list[dict[str, Any]] = [{"type": "input_image", "image_url": data_url(file)} for file in files]
        return {**common, "max_output_tokens": 8, "input": [{"role": "user", "content": parts}]}
    if path == "/v1/messages":
        sources = [{"type": "base64", "media_type": "image/png", "data": base64_of(file)} for file in files]
        content = [{"type": "image", "source": source} for source in sources]
        return {**common, "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    if path == "/api/chat":
        said = {"role": "user", "content": "", "images": [base64_of(file) for file in files]}
        return {"model": MODEL, "options": {"temperature": 0, "num_predict": 8}, "messages": [said], "stream": False}
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return {**common, "max_tokens": 8, "messages": [{"role": "user", "content": parts}]}


def text_of(path: str, reply: dict[str, Any]) -> str:
    if path == "/v1/responses":
        return str(reply["output"][0]["content"][0]["text"])
    if path == "/v1/messages":
        return str(reply["content"][0]["text"])
    if path == "/api/chat":
        return str(reply["message"]["content"])
    return str(reply["choices"][0]["message"]["content"])


def test_model_names_the_colour_of_the_picture_in_every_dialect(gateway: Daemon) -> None:
    colours = ((250, 10, 10), (10, 250, 10), (10, 10, 250))
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        for color, name in zip(colours, NAMES, strict=True):
            status, reply = gateway.call(path, asking(path, picture(96, 64, color=color)))
            assert status == 200, reply
            assert text_of(path, reply) == name, path


def test_same_picture_is_cached_and_another_one_is_not(gateway: Daemon) -> None:
    path = "/v1/chat/completions"
    file, other = picture(640, 640, color=(1, 2, 3)), picture(640, 640, color=(3, 2, 1))
    first, again, another = (gateway.call(path, asking(path, each))[1]["usage"] for each in (file, file, other))
    num_tokens = (640 // SIDE) ** 2
    assert first["prompt_tokens"] == again["prompt_tokens"] == another["prompt_tokens"] > num_tokens
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, again, another)]
    assert cached[1] >= num_tokens - 64
    assert max(cached[0], cached[2]) < 64, "another picture shares only what is before it"


def test_conversation_with_ten_screenshots_reuses_all_but_the_last_turn(gateway: Daemon) -> None:
    turns: list[dict[str, Any]] = []
    side, before = 320, 0
    for number in range(10):
        shot = asking("/v1/messages", picture(side, side, color=(number, 0, 0)))["messages"][0]["content"]
        if turns:  # as agents do: a tool reads the screenshot
            call = {"type": "tool_use", "id": f"t{number}", "name": "Read", "input": {}}
            turns.append({"role": "assistant", "content": [call]})
            shot = [{"type": "tool_result", "tool_use_id": f"t{number}", "content": shot}]
        turns.append({"role": "user", "content": shot})
        body = {"model": MODEL, "max_tokens": 2, "temperature": 0, "messages": turns}
        status, reply = gateway.call("/v1/messages", body)
        assert status == 200, reply
        usage = reply["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert usage["cache_read_input_tokens"] >= before - 64, f"turn {number}: {usage}"
        before = total
    assert before > 10 * (side // SIDE) ** 2


def test_bad_picture_ends_only_its_own_request(gateway: Daemon) -> None:
    path = "/v1/chat/completions"
    status, reply = gateway.call(path, asking(path, picture(64, 64), picture(64, 64)[:70]))
    assert (status, reply["error"]["param"]) == (400, "messages[0].content[1]")
    for file in (animated("GIF"), picture(1, 1), picture(40, 40, mode="CMYK", color=(9, 9, 9, 9), kind="JPEG")):
        status, reply = gateway.call(path, asking(path, file))
        assert status == 200, reply


def test_counts_and_lists_say_what_the_model_reads(gateway: Daemon) -> None:
    _, counted = gateway.call("/v1/messages/count_tokens", asking("/v1/messages", picture(640, 320)))
    _, reply = gateway.call("/v1/messages", asking("/v1/messages", picture(640, 320)))
    usage = reply["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    _, listed = gateway.call(f"/v1/models/{MODEL}")
    assert listed["capabilities"]["vision"]
    _, shown = gateway.call("/api/show", {"model": MODEL})
    assert "vision" in shown["capabilities"]
    _, props = gateway.call(f"/props?model={MODEL}")
    assert props["modalities"]["vision"]
    status, rejected = gateway.call(
        "/v1/chat/completions", asking("/v1/chat/completions", picture()) | {"model": "tiny"}
    )
    assert status == 400
    assert MODEL in rejected["error"]["message"]
