"""Which media reach the server of a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortex.wire.errors import InvalidValue, MalformedJSON
from cortex.wire.pictures.media_urls import check_media, may_have_addresses


def chat(content: Any) -> bytes:
    return json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": content}]}).encode()


@pytest.mark.parametrize(
    "content",
    [
        "see http://example.com/a.png and file:///etc/passwd",
        None,
        [{"type": "text", "text": "http://example.com"}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}],
        [{"type": "image_url", "image_url": "DATA:image/png;base64,AAAA"}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
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
    assert may_have_addresses(body)
    with pytest.raises(InvalidValue, match=r"may not fetch .*`data:` URL"):
        check_media(body)


@pytest.mark.parametrize(
    "part",
    [
        rb'{"type": "image_url", "image_url": {"\u0075rl": "/etc/passwd"}}',
        rb'{"type": "image", "image": " \u0068ttps://10.0.0.1/a"}',
        rb'{"type": "image", "image": "http:/\/10.0.0.1/a"}',
        rb'{"type": "image", "image": "http:\/\/10.0.0.1/a"}',
        rb'{"type": "image", "image": "FiLe:etc"}',
    ],
)
def test_escapes_hide_no_address(part: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": [%s]}]}' % part
    assert may_have_addresses(body)
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_media(body)


@pytest.mark.parametrize(
    "body", [b'{"messages": [}', b'{"messages": [{"content": ' + b"[" * 9000 + b"]" * 9000 + b"}]}"]
)
def test_body_that_cannot_be_checked_is_rejected(body: bytes) -> None:
    with pytest.raises(MalformedJSON):
        check_media(body)
