"""Which media reach the server of a model."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.wire.errors import InvalidValue
from cortex.wire.pictures.media_urls import check_media

from ...picture_files import base64_of, data_url, picture

FILE = picture(8, 8)
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": content}]}


@pytest.mark.parametrize(
    "content",
    [
        "see http://example.com/a.png and file:///etc/passwd",
        None,
        [{"type": "text", "text": "http://example.com"}],
        [{"type": "image_url", "image_url": {"url": data_url(FILE), "detail": "low"}}],
        [{"type": "image_url", "image_url": data_url(FILE).replace("data:", "DATA:")}],
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(FILE)}}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}],
    ],
)
def test_what_is_in_the_request_passes(content: Any) -> None:
    check_media(chat(content))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://10.0.0.1/a"}},
        {"type": "image_url", "image_url": "https://10.0.0.1/a"},
        {"image_url": "HTTP://10.0.0.1/a"},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "audio_url", "audio_url": {"url": "/etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": " http://10.0.0.1/a", "format": "wav"}},
        {"type": "file", "file": {"file_data": "file:/etc/passwd"}},
        {"type": "image", "image": "s3://bucket/key"},
    ],
)
def test_what_would_be_fetched_is_rejected(part: Any) -> None:
    body = chat([{"type": "text", "text": "what is it?"}, part])
    with pytest.raises(InvalidValue, match=r"may not fetch .*`data:` URL"):
        check_media(body)


@pytest.mark.parametrize("file", [b"just text", SVG, b"<html></html>", FILE[:10]])
def test_what_is_no_picture_is_rejected_as_a_node_rejects_it(file: bytes) -> None:
    url, source = data_url(file), {"type": "base64", "media_type": "image/png", "data": base64_of(file)}
    block = {"type": "image", "source": source}
    bodies: dict[str, dict[str, Any]] = {
        "messages[0].content[1]": {"messages": [{"role": "user", "content": [{}, {"image_url": {"url": url}}]}]},
        "messages[0].content[0].content[0]": {
            "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [block]}]}]
        },
        "input[0].content[0]": {"input": [{"content": [{"type": "input_image", "image_url": url}]}]},
        "input[0].output[0]": {"input": [{"type": "function_call_output", "output": [{"image_url": url}]}]},
    }
    for param, body in bodies.items():
        with pytest.raises(InvalidValue, match="the picture cannot be read") as caught:
            check_media(body)
        assert caught.value.param == param


def test_a_picture_that_is_not_in_base64_is_rejected() -> None:
    with pytest.raises(InvalidValue, match="not in base64"):
        check_media(chat([{"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>"}}]))
