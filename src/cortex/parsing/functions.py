"""The functions that read and write request bodies: called at once for small bodies, in the parse process for large
ones. They raise the CortexError of a body that is invalid.

A large value that a call takes in addition to the body is appended to it: a call has one large block of bytes.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from cortex.foreign.body import server_body
from cortex.ipc.channel import ChannelMessage
from cortex.parsing import envelope
from cortex.parsing.conversations import Completion, Joined, StoredSize, complete, find_references, list_items
from cortex.parsing.envelope import ByteRange
from cortex.parsing.pictures import find_urls, inline
from cortex.wire import packed_request
from cortex.wire.dialects import openai_chat
from cortex.wire.dialects.anthropic_messages import BILLED, strip_billing_header
from cortex.wire.dialects.anthropic_messages.batch import parse_batch
from cortex.wire.dialects.ollama.embeddings import embed_request
from cortex.wire.dialects.openai_responses.socket_events import read_event
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import InvalidValue
from cortex.wire.fields.body import parse, replace_fields
from cortex.wire.packed_request import encode_head
from cortex.wire.pictures.files import check_files, take_files
from cortex.wire.pooling.parse import ROUTES as POOLING_ROUTES
from cortex.wire.pooling.request import PoolingRequest
from cortex.wire.preset import Preset
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest
from cortex.wire.tenant import narrowed


class Parsed(ChannelMessage, frozen=True):
    head: bytes
    """The head of the request as JSON."""
    body: bytes
    """The request, packed or translated; packed without `token_prompts`."""
    files: tuple[bytes, ...] = ()
    """The pictures of a packed request."""
    token_prompts: tuple[tuple[int, ...], ...] = ()
    """As in `PackedRequest`."""


class ParsedText(ChannelMessage, frozen=True):
    model: str
    text: str
    adds_special: bool = False
    """With the begin and end tokens of the model."""
    parses_special: bool = True
    """Control tokens in the text are such; otherwise they are only text."""


class ReadBody(ChannelMessage, frozen=True):
    summary: RequestSummary
    spans: tuple[ByteRange, ...]
    """Where the conversation is in the body."""
    is_stripped: bool
    changed: bytes | None
    """The body, if it is not the client's."""


class CompletedBody(ChannelMessage, frozen=True):
    summary: RequestSummary
    spans: tuple[ByteRange, ...]
    """As in `ReadBody`."""
    stored_input: bytes | None
    body: bytes


def functions() -> dict[str, Callable[..., Any]]:
    gc.disable()  # JSON has no cycles, and a collection would visit millions of objects again and again
    table = (
        parse_request,
        translate_request,
        embed_request,
        edit_fields,
        server_body,
        read_relayed,
        read_preset,
        parse_tokenize,
        parse_pooling,
        find_urls,
        inline_pictures,
        find_references,
        read_event,
        parse_batch,
        complete_conversation,
        list_items,
    )
    return {each.__name__: each for each in table}


def parse_request(dialect: str, strip_billing: bool, generates: bool, tenant: bytes, body: bytes) -> Parsed:
    """An inference request, without its billing line if `strip_billing`. Without `generates` only the tokens of its
    prompt are counted. `tenant`: of the client, as its gateway names it; empty: nobody does."""
    if strip_billing and dialect in BILLED:
        body = strip_billing_header(body)
    codec = DIALECTS[dialect]
    parse = codec.parse if generates or codec.parse_counted is None else codec.parse_counted
    return _packed(parse(body), tenant)


def translate_request(dialect: str, model: str, tenant: bytes, body: bytes) -> Parsed:
    """An inference request for `model` of a server that speaks only OpenAI chat, with `tenant` as its salt; empty: it
    keeps that of the client, if there is one."""
    request = DIALECTS[dialect].parse(body)
    return Parsed(encode_head(request), translated(request, model, tenant))


def edit_fields(values: dict[str, str], body: bytes) -> bytes:
    """A body with other values for some fields; all else stays as it is."""
    return replace_fields(body, values)


def read_relayed(dialect: str, generates: bool, strip_billing: bool, body: bytes) -> ReadBody:
    """A body that is relayed, of which only the envelope is read."""
    found = envelope.read_relayed(body, dialect, generates=generates, strip_billing=strip_billing)
    changed = found.body if found.body is not body else None
    return ReadBody(found.envelope.summary, envelope.spans(found), found.is_stripped, changed)


def read_preset(dialect: str, generates: bool, is_opaque: bool, preset: bytes, body: bytes) -> ReadBody:
    """A body that is relayed, with the fields of `preset`, which is JSON."""
    fields = msgspec.json.decode(preset, type=Preset)
    found = envelope.read_preset(body, dialect, generates, fields, is_opaque)
    return ReadBody(found.envelope.summary, envelope.spans(found), False, found.body)


def parse_tokenize(tenant: bytes, body: bytes) -> Parsed | ParsedText:
    """A request for the tokens of a text or of a conversation. `tenant`: as in `parse_request`."""
    fields = parse(body)
    if "messages" in fields:
        return _packed(openai_chat.parse(body), tenant)
    name = next((name for name in ("prompt", "content") if name in fields), "text")
    adds = fields.flag("add_special") or fields.flag("add_special_tokens") or False
    return ParsedText(fields.model(), fields.required_text(name), adds, fields.flag("parse_special") is not False)


def parse_pooling(path: str, body: bytes) -> PoolingRequest:
    """A request for vectors or scores; `path`: its route."""
    return POOLING_ROUTES[path](body)


def inline_pictures(urls: tuple[str, ...], sizes: tuple[int, ...], body: bytes) -> bytes:
    """A request with files in place of these addresses. The files follow it in `body`; `sizes`: their bytes."""
    ends = list(itertools.accumulate(sizes, initial=len(body) - sum(sizes)))
    files = {url: body[start:end] for url, (start, end) in zip(urls, itertools.pairwise(ends), strict=True)}
    return inline(body[: ends[0]], files)


def complete_conversation(
    completion: Completion, num_earlier: int, sizes: tuple[StoredSize, ...], body: bytes
) -> CompletedBody:
    """A request of the Responses API, joined with stored responses: it continues the first `num_earlier`, and refers to
    items of the others."""
    completed, stored_input = complete(Joined(body, sizes), num_earlier, completion)
    return CompletedBody(completed.envelope.summary, envelope.spans(completed), stored_input, completed.body)


def translated(request: GenerateRequest, model: str, tenant: bytes = b"") -> bytes:
    """`request` for `model` in OpenAI chat, without a limit of tokens, and with `tenant`, if there is one, in place of
    the client's salt. Raises InvalidValue for what chat cannot express, and for pictures that are only addresses: the
    server would fetch them from inside its own network."""
    if request.prompt is not None:
        raise InvalidValue("A raw prompt cannot be sent to this server; send it to /v1/completions.", param="raw")
    check_files(request)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=None)
    tenant = tenant or request.tenant
    return openai_chat.build(msgspec.structs.replace(request, model=model, sampling=sampling, tenant=tenant))


def _packed(request: GenerateRequest, tenant: bytes) -> Parsed:
    if tenant:
        request = msgspec.structs.replace(request, tenant=narrowed(tenant, request.tenant))
    request, files = take_files(request)
    rest, token_prompts = packed_request.take_tokens(request)
    return Parsed(encode_head(request), packed_request.encode(rest), files, token_prompts)
