"""JSON bodies for servers that are not ours: what was read here, written again.

Servers differ in how they read a body: which of two equal names they take, and whether they ignore case. So a server
gets what this program has read and checked, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from cortex.ipc.channel import ChannelMessage
from cortex.wire.dialects.registry import DIALECTS, ROUTES
from cortex.wire.errors import InvalidValue, MalformedJSON
from cortex.wire.fields.body import decode_object
from cortex.wire.fields.tables.by_path import TABLES
from cortex.wire.pictures.media_urls import check_media
from cortex.wire.pooling.parse import ROUTES as POOLING_ROUTES


class ServerBody(ChannelMessage, frozen=True):
    """A body without the fields that are yet to be written."""

    body: bytes
    """A JSON object."""

    def with_fields(self, values: Mapping[str, Any]) -> bytes:
        """The body with fields that it does not have."""
        if not values:
            return self.body
        first = msgspec.json.encode(values)
        return first if self.body == b"{}" else b"".join((first[:-1], b",", memoryview(self.body)[1:]))


Access = Literal["any", "known", "counted"]
"""What a client may send to a server: any fields; those of the table; or only what the parser reads, too, so that all
tokens can be counted."""


def server_body(path: str, body: bytes, without: tuple[str, ...], access: Access = "any") -> ServerBody:
    """The body of a request to `path`, which a table describes, without some of its fields. Raises the CortexError of
    one that may not be sent."""
    values = decode_object(body)
    table = TABLES[path]
    table.check_spelling(values)
    if access == "counted":
        _check_parsed(path, body)
    for name in without:
        values.pop(name, None)
    if access != "any":
        table.check_known(values)
    try:
        check_media(values, table)
        return ServerBody(msgspec.json.encode(values))
    except RecursionError:
        raise MalformedJSON("The body is nested too deeply; flatten it.") from None


def check_limit(max_tokens: int) -> None:
    """Raises InvalidValue for a limit of a budget that a server could read as none."""
    if max_tokens < 1:
        raise InvalidValue("max_tokens: this server may read 0 as no limit; send at least 1.", param="max_tokens")


def _check_parsed(path: str, body: bytes) -> None:
    """Raises what the parser of the path raises."""
    if path in POOLING_ROUTES:
        POOLING_ROUTES[path](body)
    else:
        DIALECTS[ROUTES[path]].parse(body)
