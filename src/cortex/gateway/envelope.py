"""The little of a request body that the gateway reads, and the two edits it may make.

Only the fields that routing and metering need are decoded; the rest stays bytes. An edit replaces one
top-level value and leaves every other value byte for byte as the client wrote it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from cortex.wire.errors import CortexError, InvalidValue, MalformedJSON, MissingModel

BILLING_HEADER = b"x-anthropic-billing-header"
PREFIX_BYTES = 4096
"""How much of the conversation's start identifies it for prefix affinity."""


ABSENT = Raw()


class Envelope(msgspec.Struct, frozen=True):
    """What every inference body may carry, whatever its dialect."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    system: Raw = ABSENT
    instructions: Raw = ABSENT
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT

    @property
    def completion_limit(self) -> int | None:
        """The most tokens the client lets the model generate, where it said so."""
        return self.max_completion_tokens or self.max_output_tokens or self.max_tokens

    def leading_bytes(self) -> bytes:
        """The start of the conversation: what two requests of one session have in common."""
        parts = (self.system, self.instructions, self.messages, self.prompt, self.input)
        return b"".join(bytes(part)[:PREFIX_BYTES] for part in parts)[:PREFIX_BYTES]


_decoder = msgspec.json.Decoder(Envelope)
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_blocks_decoder = msgspec.json.Decoder(list[Raw])


def read(body: bytes) -> Envelope:
    """The envelope of `body`. Raises MalformedJSON, InvalidValue or MissingModel."""
    try:
        envelope = _decoder.decode(body)
    except msgspec.ValidationError as problem:
        raise _invalid(str(problem)) from problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {problem}") from problem
    if not envelope.model:
        raise MissingModel(
            'The body names no model; add "model", one of those that GET /v1/models lists.', param="model"
        )
    return envelope


def _invalid(problem: str) -> CortexError:
    reason, at, path = problem.partition(" - at `$")
    if not at:
        return MalformedJSON(f"The body must be a JSON object: {reason}.")
    param = path.rstrip("`").lstrip(".")
    return InvalidValue(f"{param}: {reason}.", param=param)


def replace_model(body: bytes, model: str) -> bytes:
    """`body` with another model name, everything else untouched."""
    fields = _object_decoder.decode(body)
    fields["model"] = Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def strip_billing_header(body: bytes, envelope: Envelope) -> bytes:
    """`body` without the system blocks that hold only the client's billing line; `body` itself when it has none.

    Claude Code puts that line, different for every request, in front of the prompt, where it would
    defeat every prefix cache behind it.
    """
    if BILLING_HEADER not in bytes(envelope.system):
        return body
    try:
        blocks = _blocks_decoder.decode(envelope.system)
    except msgspec.ValidationError:
        return body  # a plain string: the application's own prompt, never edited
    kept = [block for block in blocks if not _is_billing_block(block)]
    if len(kept) == len(blocks):
        return body
    fields = _object_decoder.decode(body)
    if kept:
        fields["system"] = Raw(msgspec.json.encode(kept))
    else:
        del fields["system"]
    return msgspec.json.encode(fields)


def _is_billing_block(block: Raw) -> bool:
    value: Any = msgspec.json.decode(block)
    text = value.get("text") if isinstance(value, dict) else None
    return isinstance(text, str) and text.lstrip().lower().startswith(BILLING_HEADER.decode())
