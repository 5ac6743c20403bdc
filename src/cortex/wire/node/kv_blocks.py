"""The protocol for KV blocks that one node gets from another: the request, and the gateway's header that names the
source."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from cortex.wire.node.neighbours import Neighbour
from cortex.wire.node.protocol import NodeValue

PATH: Final = "/kv/blocks"
SCOPE: Final = "KV blocks"
"""The scope of tickets for them. No repository has such a name."""
PAGES: Final = "x-cortex-kv-pages"
"""In the response: how many leading pages it has."""
SOURCE: Final = "x-cortex-kv-source"
"""A node that has computed more of the prompt, as `Neighbour` in base64. Only a gateway sets it."""
MAX_SOURCE_BYTES: Final = 32 * 1024
"""The longest value of that header: the head of a request has to hold it."""


class BlocksRequest(NodeValue, frozen=True):
    """Asks for the blocks of a prefix. The response is what `neuron/engine/host_pages/block_files.py` writes."""

    model: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """The fingerprint of weights, dtypes and layout, which must be equal."""
    digests: Annotated[tuple[Annotated[bytes, Meta(min_length=24, max_length=24)], ...], Meta(max_length=1 << 17)]
    """Of the pages of the prefix, in order. They begin with the tenant."""
    last_first: bool = False
    """Whether the last pages are sent first, because the first ones are computed meanwhile."""


def source_header(source: Neighbour) -> bytes:
    return base64.b64encode(msgspec.json.encode(source))


def read_source(header: bytes | None) -> Neighbour | None:
    """None if there is no readable one."""
    try:
        return None if header is None else msgspec.json.decode(base64.b64decode(header, validate=True), type=Neighbour)
    except (binascii.Error, msgspec.MsgspecError, ValueError):
        return None
