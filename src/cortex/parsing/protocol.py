"""The jobs of the processes that parse, and their replies."""

from __future__ import annotations

import itertools

import msgspec

from cortex.foreign.body import Access, ServerBody, server_body
from cortex.ipc.channel import ChannelMessage
from cortex.parsing import conversations, picture_urls, relayed
from cortex.parsing.conversations import Completion, Joined, StoredSize
from cortex.parsing.picture_urls import PictureUrl
from cortex.parsing.relayed import ByteRange
from cortex.wire import packed_request
from cortex.wire.dialects import anthropic_messages, openai_chat
from cortex.wire.dialects.anthropic_messages import BILLED, strip_billing_header
from cortex.wire.dialects.ollama import embeddings
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import InvalidValue
from cortex.wire.fields.body import parse
from cortex.wire.fields.raw_fields import replace_fields
from cortex.wire.node.protocol import Dialect
from cortex.wire.packed_request import encode_head
from cortex.wire.pictures.files import check_files, take_files
from cortex.wire.pooling.parse import ROUTES as POOLING_ROUTES
from cortex.wire.pooling.request import PoolingRequest
from cortex.wire.rejection import Rejected
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest
from cortex.wire.tenant import tenant_of


class ParseRequest(ChannelMessage, frozen=True):
    """An inference request."""

    dialect: Dialect
    strip_billing: bool
    """Whether the billing line is removed."""
    generates: bool
    """Otherwise only the tokens of its prompt are counted."""
    tenant: bytes
    """Of the client, as its gateway names it; empty: nobody does."""
    body: bytes


class TranslateRequest(ChannelMessage, frozen=True):
    """An inference request for `model` of a server that speaks only OpenAI chat."""

    dialect: Dialect
    model: str
    tenant: bytes
    """Which the server reads as a salt; empty: it gets that of the client, if there is one."""
    body: bytes


class TranslateEmbed(ChannelMessage, frozen=True):
    """A request of Ollama's embedding routes, for `model` of `/v1/embeddings`; None: the model that it names."""

    model: str | None
    body: bytes


class EditFields(ChannelMessage, frozen=True):
    """A body that gets other values for some fields, and loses others; all else stays as it is."""

    values: dict[str, str | int]
    without: tuple[str, ...]
    body: bytes


class WriteServerBody(ChannelMessage, frozen=True):
    """A body for a server that is not ours, of a request to `path`, without some of its fields."""

    path: str
    without: tuple[str, ...]
    access: Access
    body: bytes


class ReadRelayed(ChannelMessage, frozen=True):
    """A body that is relayed, of which only the envelope is read."""

    dialect: Dialect
    generates: bool
    strip_billing: bool
    """As in `ParseRequest`."""
    body: bytes


class ParseTokenize(ChannelMessage, frozen=True):
    """A request for the tokens of a text or of a conversation."""

    tenant: bytes
    """As in `ParseRequest`."""
    body: bytes


class ParsePooling(ChannelMessage, frozen=True):
    """A request for vectors or scores; `path`: its route."""

    path: str
    body: bytes


class FindPictureUrls(ChannelMessage, frozen=True):
    """A request whose pictures may be addresses."""

    body: bytes


class InlinePictures(ChannelMessage, frozen=True):
    """A request whose pictures at these addresses are put into it."""

    urls: tuple[str, ...]
    sizes: tuple[int, ...]
    """The bytes of each file; the files follow the request in `body`."""
    body: bytes


class FindReferences(ChannelMessage, frozen=True):
    """A request of the Responses API."""

    generates: bool
    body: bytes


class CompleteConversation(ChannelMessage, frozen=True):
    """A request of the Responses API, joined with stored responses."""

    completion: Completion
    num_earlier: int
    """How many of the stored responses it continues; it refers to items of the others."""
    sizes: tuple[StoredSize, ...]
    body: bytes


class ListItems(ChannelMessage, frozen=True):
    """A chain of stored responses, whose input items are listed."""

    limit: int
    ascending: bool
    after: str | None
    sizes: tuple[StoredSize, ...]
    body: bytes


class Parsed(ChannelMessage, frozen=True):
    head: bytes
    """The head of the request as JSON."""
    body: bytes
    """The request, packed or translated; packed without `token_prompts`."""
    files: tuple[bytes, ...] = ()
    """The pictures of a packed request."""
    token_prompts: tuple[tuple[int, ...], ...] = ()
    """As in `PackedRequest`."""


class Edited(ChannelMessage, frozen=True):
    body: bytes


class ReadRelayedBody(ChannelMessage, frozen=True):
    facts: RequestSummary
    spans: tuple[ByteRange, ...]
    """Where the conversation is in the body."""
    is_stripped: bool
    changed: bytes | None
    """The body, if it is not the client's."""


class ParsedText(ChannelMessage, frozen=True):
    model: str
    text: str
    adds_special: bool = False
    """With the begin and end tokens of the model."""
    parses_special: bool = True
    """Control tokens in the text are such; otherwise they are only text."""


class ParsedPooling(ChannelMessage, frozen=True):
    request: PoolingRequest


class FoundPictureUrls(ChannelMessage, frozen=True):
    found: tuple[PictureUrl, ...]


class FoundReferences(ChannelMessage, frozen=True):
    are_any: bool
    response_ids: tuple[str, ...]


class CompletedBody(ChannelMessage, frozen=True):
    facts: RequestSummary
    spans: tuple[ByteRange, ...]
    """As in `ReadRelayedBody`."""
    stored_input: bytes | None
    body: bytes


class ListedItems(ChannelMessage, frozen=True):
    body: bytes


Job = (
    ParseRequest
    | TranslateRequest
    | TranslateEmbed
    | EditFields
    | WriteServerBody
    | ReadRelayed
    | ParseTokenize
    | ParsePooling
    | FindPictureUrls
    | InlinePictures
    | FindReferences
    | CompleteConversation
    | ListItems
)
"""The body is the last field of each, so that it can be sent without being copied."""
Result = (
    Parsed
    | ParsedText
    | ParsedPooling
    | Edited
    | ServerBody
    | ReadRelayedBody
    | FoundPictureUrls
    | FoundReferences
    | CompletedBody
    | ListedItems
)
Reply = Result | Rejected


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


def run(job: Job) -> Result:
    """Raises a CortexError for a body that is invalid."""
    match job:
        case ParseRequest(dialect, strip_billing, generates, tenant, body):
            if strip_billing and dialect in BILLED:
                body = strip_billing_header(body)
            if dialect == "anthropic_messages" and not generates:
                return _packed(anthropic_messages.parse(body, generates=False), tenant)
            return _packed(DIALECTS[dialect].parse(body), tenant)
        case TranslateRequest(dialect, model, tenant, body):
            request = DIALECTS[dialect].parse(body)
            return Parsed(encode_head(request), translated(request, model, tenant))
        case TranslateEmbed(model, body):
            return Edited(embeddings.request_body(body, model))
        case EditFields(values, without, body):
            return Edited(replace_fields(body, values, without=without))
        case WriteServerBody(path, without, access, body):
            return server_body(path, body, without, access)
        case ReadRelayed(dialect, generates, strip_billing, body):
            found = relayed.read(body, dialect, generates=generates, strip_billing=strip_billing)
            changed = found.body if found.body is not body else None
            return ReadRelayedBody(found.envelope.facts, relayed.spans(found), found.is_stripped, changed)
        case ParseTokenize(tenant, body):
            fields = parse(body)
            if "messages" in fields:
                return _packed(openai_chat.parse(body), tenant)
            name = next((name for name in ("prompt", "content") if name in fields), "text")
            adds = fields.flag("add_special") or fields.flag("add_special_tokens") or False
            return ParsedText(
                fields.model(), fields.required_text(name), adds, fields.flag("parse_special") is not False
            )
        case ParsePooling(path, body):
            return ParsedPooling(POOLING_ROUTES[path](body))
        case FindPictureUrls(body):
            return FoundPictureUrls(picture_urls.find_urls(body))
        case InlinePictures(urls, sizes, body):
            ends = list(itertools.accumulate(sizes, initial=len(body) - sum(sizes)))
            files = {url: body[start:end] for url, (start, end) in zip(urls, itertools.pairwise(ends), strict=True)}
            return Edited(picture_urls.inline(body[: ends[0]], files))
        case FindReferences(generates, body):
            return FoundReferences(*conversations.references_in(body, generates=generates))
        case CompleteConversation(completion, num_earlier, sizes, body):
            completed, stored_input = conversations.complete(Joined(body, sizes), num_earlier, completion)
            return CompletedBody(completed.envelope.facts, relayed.spans(completed), stored_input, completed.body)
        case ListItems(limit, ascending, after, sizes, body):
            page = conversations.list_items(Joined(body, sizes), limit=limit, ascending=ascending, after=after)
            return ListedItems(page)


def _packed(request: GenerateRequest, tenant: bytes) -> Parsed:
    if tenant:
        request = msgspec.structs.replace(request, tenant=tenant_of(tenant, request.tenant))
    request, files = take_files(request)
    rest, token_prompts = packed_request.take_tokens(request)
    return Parsed(encode_head(request), packed_request.encode(rest), files, token_prompts)
