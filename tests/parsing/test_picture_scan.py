"""Pictures are found in bodies of every dialect without parsing them, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortex.parsing.envelope import read
from cortex.parsing.pictures import FoundPictures
from cortex.parsing.pictures import find_pictures as find_in
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.pictures.files import MAX_PICTURES

from ..picture_files import base64_of, data_url, picture

FILES = [
    picture(1024, 512),
    picture(1024, 512, kind="JPEG", comment=b"x" * 50_000),
    picture(1024, 512, mode="P", color=1, kind="GIF"),
    picture(1024, 512, kind="WEBP"),
]
TOKENS = 37 * 19


def find_pictures(body: bytes, dialect: str) -> FoundPictures:
    return find_in(body, DIALECTS[dialect].fields.scan(body), dialect)


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def bodies(file: bytes) -> dict[str, dict[str, Any]]:
    text = base64_of(file)
    source = {"type": "base64", "media_type": "image/png", "data": text}
    return {
        "openai_chat": {"messages": said([{"type": "image_url", "image_url": {"url": data_url(file)}}])},
        "openai_responses": {"input": said([{"type": "input_image", "image_url": data_url(file, "")}])},
        "anthropic_messages": {"messages": said([{"type": "image", "source": source}]), "max_tokens": 5},
        "ollama_chat": {"messages": said("?", images=[text, text])},
        "ollama_generate": {"prompt": "?", "images": [text]},
    }


@pytest.mark.parametrize("file", FILES, ids=["png", "jpeg", "gif", "webp"])
def test_picture_counts_as_tokens_instead_of_bytes(file: bytes) -> None:
    for dialect, body in bodies(file).items():
        number = 2 if dialect == "ollama_chat" else 1
        for encoded in (json.dumps(body), json.dumps(body, separators=(",", ":")), json.dumps(body, indent=1)):
            for written in (encoded, encoded.replace("/", "\\/")):
                found = find_pictures(written.encode(), dialect)
                assert (found.number, found.num_tokens) == (number, number * TOKENS), (dialect, written[:200])
                assert 0 < len(written) - found.num_bytes - written.count("\\/") < 400


def test_facts_have_what_was_found() -> None:
    body = json.dumps({"model": "m", **bodies(FILES[0])["openai_chat"]}).encode()
    summary = read(body, "openai_chat").summary
    assert summary.has_pictures
    assert (summary.picture_bytes, summary.picture_tokens) == (len(base64_of(FILES[0])), TOKENS)
    plain = read(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}', "openai_chat").summary
    assert not plain.has_pictures


@pytest.mark.parametrize(
    "content",
    [
        data_url(FILES[0]),
        base64_of(FILES[0]),
        f"data: {data_url(FILES[0])}",
        [{"type": "text", "text": base64_of(FILES[0])}],
        [{"type": "text", "text": json.dumps({"url": data_url(FILES[0])})}],
        [{"type": "text", "text": "x", "image_url": {"url": data_url(FILES[0])}}],
        [{"type": "text", "text": "x", "source": {"type": "base64", "data": base64_of(FILES[0])}}],
        [{"type": "tool_use", "id": "1", "name": "f", "input": {"type": "image", "url": data_url(FILES[0])}}],
    ],
)
def test_text_is_no_picture(content: Any) -> None:
    body = json.dumps({"messages": said(content)}).encode()
    dialects: tuple[str, ...] = ("openai_chat", "anthropic_messages")
    for dialect in dialects:
        assert find_pictures(body, dialect).num_bytes == 0


@pytest.mark.parametrize("name", ["metadata", "tools", "x", "url", "input", "prediction"])
def test_picture_in_another_field_is_text(name: str) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(FILES[0])}, "url": data_url(FILES[0])}
    body = json.dumps({"messages": said("?"), name: [{"role": "user", "content": [part]}]}).encode()
    assert find_pictures(body, "openai_chat") == (0, 0, 0)


def test_list_of_prompts_is_no_list_of_pictures() -> None:
    body = json.dumps({"prompt": [base64_of(FILES[0])]}).encode()
    assert find_pictures(body, "openai_completions").num_bytes == 0


def test_what_is_no_picture_counts_as_text() -> None:
    body = json.dumps(bodies(FILES[0][:20])["openai_chat"]).encode()
    assert find_pictures(body, "openai_chat") == (1, 0, 0)


def test_pictures_beyond_those_of_one_request_count_as_text() -> None:
    gif = base64_of(picture(1, 1, mode="P", color=0, kind="GIF"))
    found = find_pictures(json.dumps({"messages": said("?", images=[gif] * 5000)}).encode(), "ollama_chat")
    assert found == (MAX_PICTURES, MAX_PICTURES * len(gif), MAX_PICTURES * 256)
