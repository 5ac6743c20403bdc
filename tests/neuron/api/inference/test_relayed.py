"""What the server of a model gets of a request, and what that may cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cortex.foreign.body import Access
from cortex.http.request import Request
from cortex.neuron.api import bodies
from cortex.neuron.api.inference.routes import RelayedSession
from cortex.parsing.parser import BodyParser
from cortex.wire.errors import CortexError, InsufficientQuota
from cortex.wire.node.headers import FIELDS, PRINCIPAL, TOKEN_LIMIT

from ....picture_files import base64_of, data_url, picture

FILE = picture(64, 48) + bytes(40_000)
LIMIT = 2000
"""Fewer tokens than the file has bytes."""


async def session(
    dialect: Any,
    content: list[dict[str, Any]] | str,
    token_limit: int,
    *,
    tenant: bytes = b"",
    stripped: tuple[str, ...] = (),
    access: Access = "known",
    **fields: Any,
) -> RelayedSession:
    messages = [{"role": "user", "content": content}]
    body = msgspec.json.encode({"model": "m", "max_tokens": 100, "messages": messages, **fields})
    packed = await BodyParser().parse(dialect, body, "alice", tenant=tenant)
    upstream = SimpleNamespace(fields={}, stripped_fields=stripped, harness="vllm")
    chat = body if dialect == "openai_chat" else None
    unused = cast("Any", None)
    return RelayedSession(
        unused, unused, packed, cast("Any", upstream), chat, access, id="r", principal="alice", token_limit=token_limit
    )


CHAT = {"type": "image_url", "image_url": {"url": data_url(FILE)}}
MESSAGES = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(FILE)}}


@pytest.mark.parametrize(("dialect", "part"), [("openai_chat", CHAT), ("anthropic_messages", MESSAGES)])
async def test_pictures_count_by_their_size_against_a_budget(dialect: str, part: dict[str, Any]) -> None:
    body, num_prompt_tokens = (await session(dialect, [part], LIMIT)).make_body()
    assert len(body) > 40_000
    assert 256 <= num_prompt_tokens <= 1000
    assert msgspec.json.decode(body)["max_tokens"] == 100
    with pytest.raises(InsufficientQuota):
        (await session(dialect, [part], 200)).make_body()


async def test_a_server_gets_only_known_fields_where_the_gateway_says_so() -> None:
    """Others might choose another model than the key may use, or somebody else's cache."""
    with pytest.raises(CortexError, match="lora_name"):
        (await session("openai_chat", "hello", LIMIT, lora_name="b")).make_body()
    body, _ = (await session("openai_chat", "hello", LIMIT, access="any", lora_name="b")).make_body()
    assert msgspec.json.decode(body)["lora_name"] == "b"


@pytest.mark.parametrize(("header", "access"), [(FIELDS, "known"), (TOKEN_LIMIT, "known"), (PRINCIPAL, "any")])
def test_headers_of_a_gateway_choose_what_a_server_gets(header: str, access: str) -> None:
    request = Request(b"POST", b"/", b"", ((header.encode(), b"1"),), b"", "")
    assert bodies.access_of(request) == access


async def test_text_counts_by_its_bytes() -> None:
    with pytest.raises(InsufficientQuota):
        (await session("openai_chat", [{"type": "text", "text": "x" * 40_000}], LIMIT)).make_body()


@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic_messages"])
@pytest.mark.parametrize("stripped", [(), ("cache_salt",)])
async def test_server_separates_tenants_by_a_salt_unless_the_operator_strips_it(
    dialect: Any, stripped: tuple[str, ...]
) -> None:
    salts = []
    for tenant in (b"one", b"two"):
        made = await session(dialect, [{"type": "text", "text": "hi"}], LIMIT, tenant=tenant, stripped=stripped)
        salts.append(msgspec.json.decode(made.make_body()[0]).get("cache_salt"))
    if stripped:
        assert salts == [None, None]
    else:
        assert len(set(salts)) == 2
        assert {len(salt) for salt in salts} == {32}
    alone = await session(dialect, [{"type": "text", "text": "hi"}], LIMIT)
    assert "cache_salt" not in msgspec.json.decode(alone.make_body()[0])
