"""The envelope of a request body: the few fields that a gateway reads.

The dialect reads them with the functions of its parser, so that gateway and node agree on every request. The rest stays
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from cortex.parsing.picture_scan import find_pictures
from cortex.wire.dialects.openai_responses import read_state
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.node.protocol import Dialect
from cortex.wire.request_summary import RequestSummary
from cortex.wire.tenant import SALT

_CONVERSATION = ("system", "instructions", "messages", "prompt", "input")
_INFILLED = ("input_prefix", "prompt", "input_suffix")


class Envelope(msgspec.Struct, frozen=True):
    """What a gateway reads of a body."""

    facts: RequestSummary
    conversation: Sequence[Raw]
    """The values that hold it, from its start; `input` is the last."""

    @property
    def input(self) -> Raw:
        return self.conversation[-1]

    def prompt_bytes(self, max_bytes: int) -> bytes:
        """The conversation from its start: a later turn begins with the same bytes, up to the end of the array."""
        parts, remaining = [], max_bytes
        for field in self.conversation:
            part = memoryview(field)[:remaining]
            parts.append(part)
            remaining -= len(part)
        return b"".join(parts)


def read(body: bytes, dialect: Dialect, generates: bool = True) -> Envelope:
    """The envelope of `body` as `dialect` defines it. Raises MalformedJSON, InvalidValue or MissingModel."""
    codec = DIALECTS[dialect]
    fields = codec.FIELDS.scan(body)
    if generates:
        facts = codec.read_facts(fields)
    elif dialect == "openai_responses":
        facts = read_state(fields)
    else:
        facts = RequestSummary(fields.model(), False, 0, 1)
    if not fields.is_empty(SALT):
        facts = msgspec.structs.replace(facts, cache_salt=bytes(fields.bytes_of(SALT)[0]))
    pictures = find_pictures(body, fields, dialect)
    if pictures.number:
        _, num_bytes, num_tokens = pictures
        facts = msgspec.structs.replace(facts, has_pictures=True, picture_bytes=num_bytes, picture_tokens=num_tokens)
    names = _INFILLED if dialect == "llama_cpp_infill" else _CONVERSATION
    return Envelope(facts, fields.bytes_of(*names))
