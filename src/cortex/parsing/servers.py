"""JSON bodies for servers that are not ours: what was read here, written again.

Servers differ in how they read a body: which of two equal names they take, and whether they ignore case. So a server
gets what this program has read and checked, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cortex.ipc.channel import ChannelMessage
from cortex.wire.errors import MalformedJSON, shorten
from cortex.wire.fields.tables.by_path import TABLES
from cortex.wire.pictures.media_urls import check_media


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


def server_body(path: str, body: bytes, without: tuple[str, ...]) -> ServerBody:
    """The body of a request to `path`, which a table describes, without some of its fields. Raises MalformedJSON or
    InvalidValue."""
    try:
        values = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {shorten(str(problem))}") from None
    TABLES[path].check_spelling(values)
    check_media(values)
    for name in without:
        values.pop(name, None)
    return ServerBody(msgspec.json.encode(values))
