"""The little of a request body that the gateway reads, and the model's name where an alias stood.

Only the fields that routing and metering need are decoded; the rest stays bytes. Replacing the name leaves every
other value byte for byte as the client wrote it.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from cortex.wire.errors import CortexError, InvalidValue, MalformedJSON, MissingModel

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
