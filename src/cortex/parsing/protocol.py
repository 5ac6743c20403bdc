"""The jobs of the processes that parse, and their replies."""

from __future__ import annotations

import msgspec

from cortex.wire import openai_chat
from cortex.wire.anthropic_messages import strip_billing_header
from cortex.wire.body import parse
from cortex.wire.dialects import DIALECTS
from cortex.wire.node import Dialect
from cortex.wire.packed_request import encode_head
from cortex.wire.raw_fields import replace_model
from cortex.wire.rejection import Rejected
from cortex.wire.requests import GenerateRequest


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encoded by position: both sides are always the same version."""


class ParseRequest(_Message, frozen=True):
    """An inference request."""

    dialect: Dialect
    body: bytes
    strip_billing: bool
    """Whether the billing line is removed from a body of the messages dialect."""


class TranslateRequest(_Message, frozen=True):
    """An inference request for `model` of a server that speaks only OpenAI chat."""

    dialect: Dialect
    body: bytes
    model: str


class RenameModel(_Message, frozen=True):
    """A body in which `model` takes the place of the model's name; all else stays as it is."""

    body: bytes
    model: str


class ParseTokenize(_Message, frozen=True):
    """A request for the tokens of a text or of a conversation."""

    body: bytes


class Parsed(_Message, frozen=True):
    head: bytes
    """The head of the request as JSON."""
    body: bytes
    """The whole request, packed or translated."""


class Renamed(_Message, frozen=True):
    body: bytes


class ParsedText(_Message, frozen=True):
    model: str
    text: str


Job = ParseRequest | TranslateRequest | RenameModel | ParseTokenize
Reply = Parsed | ParsedText | Renamed | Rejected


def run(job: Job) -> Parsed | ParsedText | Renamed:
    """Raises a CortexError for a body that is invalid."""
    match job:
        case ParseRequest(dialect, body, strip_billing):
            if strip_billing and dialect == "anthropic_messages":
                body = strip_billing_header(body)
            return _packed(DIALECTS[dialect].parse(body))
        case TranslateRequest(dialect, body, model):
            request = DIALECTS[dialect].parse(body)
            translated = openai_chat.build(msgspec.structs.replace(request, model=model))
            return Parsed(encode_head(request), translated)
        case RenameModel(body, model):
            return Renamed(replace_model(body, model))
        case ParseTokenize(body):
            fields = parse(body)
            if "messages" in fields:
                return _packed(openai_chat.parse(body))
            return ParsedText(fields.model(), fields.required_text("prompt" if "prompt" in fields else "text"))


def _packed(request: GenerateRequest) -> Parsed:
    # JSON, because a schema may have integers of any size.
    return Parsed(encode_head(request), msgspec.json.encode(request))
