"""How a node reports the usage of a response to the gateway: one typed value, the same in every dialect.

A whole response carries the report in a header, a stream in an SSE comment behind its last event, which the gateway
does not pass on. A node sends a report with every response to a request that came through a gateway
(`headers.PRINCIPAL`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from cortex.wire import sse
from cortex.wire.events import Usage

HEADER = "x-cortex-usage"

_MARK = b"usage "
_COMMENT = b"\n: " + _MARK


_decoder = msgspec.json.Decoder(Usage)


class _Times(msgspec.Struct, frozen=True):
    first_token_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


_times = msgspec.json.Decoder(_Times)


def header_value(usage: Usage, first_token_s: float | None = None) -> str:
    """The value of `HEADER` for a whole response. `first_token_s`: from the request's arrival at the node to its first
    token, which the bytes of a whole response do not show."""
    timed = {} if first_token_s is None else {"first_token_s": round(first_token_s, 4)}
    return msgspec.json.encode(msgspec.structs.asdict(usage) | timed).decode()


def comment(usage: Usage) -> bytes:
    """The end of a stream. To be sent together with the last event, so that no client disconnects between the two."""
    return sse.last_comment(_MARK + msgspec.json.encode(usage))


def from_header(value: bytes) -> Usage | None:
    """The report in a header; None when it is not one."""
    try:
        return _decoder.decode(value)
    except msgspec.DecodeError:
        return None


def first_token_s(value: bytes) -> float | None:
    """The time to the first token in a header; None where it has none."""
    try:
        return _times.decode(value).first_token_s
    except msgspec.DecodeError:
        return None


def from_stream(tail: bytes) -> Usage | None:
    """The report in the last bytes of a stream; None when there is none.

    Generated text cannot pass for one: it is JSON inside an event, and JSON has no line breaks inside a string.
    """
    at = tail.rfind(_COMMENT)
    return from_header(tail[at + len(_COMMENT) :].partition(b"\n")[0]) if at >= 0 else None
