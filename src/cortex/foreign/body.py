"""JSON bodies for foreign servers, encoded again from the fields parsed here.

Servers read bodies differently: which of two equal names they take, and whether they ignore case. So a server gets only
fields that this program has parsed and checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from cortex.ipc.channel import ChannelMessage
from cortex.wire.dialects.registry import DIALECTS, ROUTES
from cortex.wire.errors import InvalidValue, MalformedJSON
from cortex.wire.fields.body import decode_object
from cortex.wire.fields.tables import opaque, pooling
from cortex.wire.fields.tables.table import FieldTable
from cortex.wire.opaque.routes import PATHS as OPAQUE_PATHS
from cortex.wire.pictures.media_urls import check_media
from cortex.wire.pooling.parse import ROUTES as POOLING_ROUTES
from cortex.wire.tenant import EVERYBODY, SALT


class ServerBody(ChannelMessage, frozen=True):
    """A body, to which fields will be added."""

    body: bytes
    """A JSON object."""

    def with_fields(self, values: Mapping[str, Any]) -> bytes:
        """The body with fields that it does not have."""
        if not values:
            return self.body
        first = msgspec.json.encode(values)
        return first if self.body == b"{}" else b"".join((first[:-1], b",", memoryview(self.body)[1:]))


Access = Literal["any", "known", "counted"]
"""Which fields a client may send to a server: any; those of the table; or only those that the parser reads, so that all
tokens can be counted."""


def server_body(path: str, without: tuple[str, ...], access: Access, body: bytes) -> ServerBody:
    """The body of a request to `path`, which a table describes, without some of its fields. Raises the CortexError of
    one that may not be sent."""
    values = decode_object(body)
    table = TABLES[path]
    if not (table.names.issuperset(values) and table.names.issuperset(without)):
        table.check_spelling(values)  # no name of the table is another spelling of one
        table.check_overrides(values, without)
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


class ServerFields(NamedTuple):
    """The fields set in a request to `path`, overriding the client's."""

    path: str
    values: Mapping[str, Any]
    tenant: bytes = EVERYBODY
    """Written if the server separates caches by a salt, unless `values` has one."""
    stripped: tuple[str, ...] = ()
    """Fields of the client that are removed."""
    is_limited: bool = False
    """Whether a budget limits the tokens of each choice, instead of the client's limits."""

    @property
    def without(self) -> tuple[str, ...]:
        """The fields of the client that `server_body` leaves out."""
        limits = TABLES[self.path].limits if self.is_limited else ()
        salt = (SALT,) if self.tenant else ()
        return (*self.stripped, *limits, *salt, *self.values)

    def written(self, limit: int | None) -> dict[str, Any]:
        """The fields with the limit of a choice, or with one that `values` has if that is smaller. Raises InvalidValue
        for a limit of a budget that a server could read as none."""
        fields = {SALT: self.tenant.hex(), **self.values} if self.tenant else dict(self.values)
        if limit is None:
            return fields
        names = TABLES[self.path].limits
        given = (fields.get(name) for name in names)
        limit = min([limit, *(value for value in given if isinstance(value, int) and value >= 0)])
        if limit < 1:
            raise InvalidValue("max_tokens: this server may read 0 as no limit; send at least 1.", param="max_tokens")
        # `best_of` would have more candidates than the budget knows of.
        return {name: fields[name] for name in fields if name not in (*names, "best_of")} | {names[0]: limit}


def _check_parsed(path: str, body: bytes) -> None:
    """Raises what the parser of the path raises."""
    if path in POOLING_ROUTES:
        POOLING_ROUTES[path](body)
    else:
        DIALECTS[ROUTES[path]].parse(body)


TABLES: Final[Mapping[str, FieldTable]] = {
    **{dialect.path: dialect.fields for dialect in DIALECTS.values() if dialect.spoken_by != "cortex"},
    "/v1/embeddings": pooling.EMBEDDINGS,
    "/embed": pooling.EMBED,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), pooling.RERANK),
    **dict.fromkeys(("/v1/score", "/score"), pooling.SCORE),
    **dict.fromkeys(OPAQUE_PATHS, opaque.FIELDS),
}
