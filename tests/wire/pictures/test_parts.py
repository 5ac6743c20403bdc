"""Pictures in the bodies of every dialect: the same value everywhere, and errors that say where."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import InvalidValue
from cortex.wire.packed_request import pack, unpack
from cortex.wire.pictures.files import MAX_PICTURES, data_url, with_files
from cortex.wire.requests import GenerateRequest, PicturePart, ToolResult

from ... import picture_files
from ...picture_files import base64_of, picture

PNG = picture(31, 17)
URL = picture_files.data_url(PNG)
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64_of(PNG)}


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


PLACES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "openai_chat",
        {"messages": said([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": URL}}])},
        "messages[0].content[1]",
    ),
    "chat, flat": (
        "openai_chat",
        {"messages": said([{"type": "image_url", "image_url": URL}])},
        "messages[0].content[0]",
    ),
    "chat, result of a tool": (
        "openai_chat",
        {"messages": [*said("?"), {"role": "tool", "tool_call_id": "c", "content": [
            {"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": URL}}]}]},
        "messages[1].content[1]",
    ),
    "responses": (
        "openai_responses",
        {"input": said([{"type": "input_image", "image_url": URL}])},
        "input[0].content[0]",
    ),
    "responses, what view_image of Codex returns": (
        "openai_responses",
        {"input": [{"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c",
                    "output": [{"type": "input_image", "image_url": URL}]}]},
        "input[1].output[0]",
    ),
    "messages": (
        "anthropic_messages",
        {"messages": said([{"type": "image", "source": SOURCE}]), "max_tokens": 9},
        "messages[0].content[0]",
    ),
    "messages, what Read of Claude Code returns": (
        "anthropic_messages",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]},
                      *said([{"type": "tool_result", "tool_use_id": "t",
                              "content": [{"type": "image", "source": SOURCE}]}])], "max_tokens": 9},
        "messages[1].content[0].content[0]",
    ),
    "ollama chat": ("ollama_chat", {"messages": said("?", images=[base64_of(PNG)])}, "messages[0].images[0]"),
    "ollama generate": ("ollama_generate", {"prompt": "?", "images": [base64_of(PNG)]}, "images[0]"),
}  # fmt: skip


def parsed(dialect: str, body: dict[str, Any]) -> GenerateRequest:
    return DIALECTS[dialect].parse(msgspec.json.encode({"model": "m", **body}))


def images_of(request: GenerateRequest) -> list[PicturePart]:
    parts = [part for message in request.messages for part in message.parts]
    inner = [each for part in parts for each in (part.parts if isinstance(part, ToolResult) else (part,))]
    return [part for part in inner if isinstance(part, PicturePart)]


@pytest.mark.parametrize("place", PLACES)
def test_every_dialect_reads_the_file_and_where_it_is(place: str) -> None:
    dialect, body, param = PLACES[place]
    (image,) = images_of(parsed(dialect, body))
    assert (image.data, image.param, image.detail) == (PNG, param, "auto")


@pytest.mark.parametrize("place", PLACES)
def test_packed_request_has_sizes_instead_of_files(place: str) -> None:
    dialect, body, param = PLACES[place]
    request = parsed(dialect, body)
    packed = pack(request)
    assert packed.files == (PNG,)
    assert packed.head.pictures == (PicturePart(param=param, num_bytes=len(PNG), width=31, height=17),)
    assert images_of(unpack(packed.whole())) == list(packed.head.pictures)
    assert base64_of(PNG)[:40].encode() not in packed.whole()
    restored = images_of(with_files(unpack(packed.whole()), packed.files))
    assert [data_url(image) for image in restored] == [URL]


@pytest.mark.parametrize("place", PLACES)
def test_error_names_the_place_of_a_file_that_is_no_picture(place: str) -> None:
    dialect, body, param = PLACES[place]
    other = msgspec.json.encode(body).replace(base64_of(PNG).encode(), base64_of(b"%PDF-1.7").encode())
    with pytest.raises(InvalidValue, match="neither JPEG nor PNG") as caught:
        pack(parsed(dialect, msgspec.json.decode(other)))
    assert caught.value.param == param


def chat_image(url: Any, **more: Any) -> GenerateRequest:
    return parsed("openai_chat", {"messages": said([{"type": "image_url", "image_url": url, **more}])})


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///etc/passwd", "not a picture"),
        ("/etc/passwd", "not a picture"),
        ("ftp://example.org/x.png", "not a picture"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,%%%%", "not valid base64"),
        ("data:image/png;base64,ÄÖÜ=", "not valid base64"),
        ("data:image/png;base64,iVBO=Rw0", "not valid base64"),
        (7, "expected a string"),
    ],
)
def test_rejects_what_is_neither_a_file_nor_an_https_address(url: Any, problem: str) -> None:
    with pytest.raises(InvalidValue, match=problem):
        chat_image(url)


@pytest.mark.parametrize("url", ["https://example.org/x.png", "http://example.org/x.png"])
def test_address_reaches_no_model(url: str) -> None:
    with pytest.raises(InvalidValue, match=r"pictures\.urls") as caught:
        pack(chat_image(url))
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    "url",
    [
        picture_files.data_url(PNG, "image/jpeg"),
        picture_files.data_url(PNG, ""),
        picture_files.data_url(PNG, "image/png;charset=utf-8"),
        "DATA:image/png;BASE64," + base64_of(PNG),
        "  " + URL.rstrip("="),
        "data:image/png;base64," + "\n".join(base64_of(PNG)[at : at + 76] for at in range(0, 999, 76)),
        "data:image/png;base64," + base64_of(PNG).replace("+", "-").replace("/", "_"),
    ],
)
def test_type_is_found_from_the_file_and_base64_may_have_any_usual_form(url: str) -> None:
    packed = pack(chat_image({"url": url}))
    assert packed.files == (PNG,)
    assert data_url(images_of(with_files(unpack(packed.whole()), packed.files))[0]) == URL


@pytest.mark.parametrize(("given", "read"), [("low", "low"), ("auto", "auto"), ("high", "high"), ("original", "high")])
def test_detail_is_read_in_both_dialects(given: str, read: str) -> None:
    assert images_of(chat_image({"url": URL, "detail": given}))[0].detail == read
    part = {"type": "input_image", "image_url": URL, "detail": given}
    assert images_of(parsed("openai_responses", {"input": said([part])}))[0].detail == read
    with pytest.raises(InvalidValue, match="is not known"):
        chat_image({"url": URL, "detail": "ultra"})


def test_files_of_a_vendor_are_not_known() -> None:
    with pytest.raises(InvalidValue, match="no files are stored"):
        parsed("openai_responses", {"input": said([{"type": "input_image", "file_id": "file-1"}])})
    source = {"type": "file", "file_id": "file-1"}
    with pytest.raises(InvalidValue, match="no files are stored"):
        parsed("anthropic_messages", {"messages": said([{"type": "image", "source": source}]), "max_tokens": 9})


def test_number_of_pictures_is_bounded() -> None:
    gif = base64_of(picture(1, 1, mode="P", color=0, kind="GIF"))
    with pytest.raises(InvalidValue, match="pictures in one request"):
        pack(parsed("ollama_chat", {"messages": said("?", images=[gif] * (MAX_PICTURES + 1))}))
