"""The messages between the lead of a model that spans nodes and a peer, over one connection for each load.

The lead sends `LoadShare`; the reply is `ShareLoaded`, `ShareFailed` or `ShareLost`. `UnloadShare` ends the share, also
while it is being loaded; the reply is `ShareUnloaded`. `KillShare` ends it with its workers, and `ShareLost` follows.
A connection that ends is the loss of the share: the lead replaces the group, the peer frees its part.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.worker.faults import FaultKind
from cortex.wire.errors import LoadFailed
from cortex.wire.node import LoadRequest


class PeerUnreachable(Exception):
    """The peer does not respond; it may later."""


class PeerRejected(LoadFailed):
    """The peer does not take part: its operator must change something."""


class Connection(Protocol):
    """One authenticated connection between two nodes. Iterating gives the messages until it ends."""

    @property
    def local_host(self) -> str:
        """The address of this end."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def send(self, message: bytes) -> None:
        """Does nothing once the connection has ended."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class ShareMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages. Named fields: the nodes may be of different versions."""


class LoadShare(ShareMessage, frozen=True):
    request: LoadRequest
    spec: LoadSpec
    """As of the lead. The peer has its own files, memory limits and address."""
    num_ranks: int
    """From the rank in `spec` on."""
    digest: str
    """Of the model's configuration on the lead: the files of both must be the same."""


class UnloadShare(ShareMessage, frozen=True):
    pass


class KillShare(ShareMessage, frozen=True):
    reason: str


class ShareLoaded(ShareMessage, frozen=True):
    notes: tuple[str, ...] = ()


class ShareFailed(ShareMessage, frozen=True):
    kind: FaultKind
    message: str
    cancelled: bool = False


class ShareLost(ShareMessage, frozen=True):
    reason: str


class ShareUnloaded(ShareMessage, frozen=True):
    pass


FromLead = LoadShare | UnloadShare | KillShare
FromPeer = ShareLoaded | ShareFailed | ShareLost | ShareUnloaded

encode = msgspec.msgpack.Encoder().encode
_from_lead: msgspec.msgpack.Decoder[FromLead] = msgspec.msgpack.Decoder(FromLead)
_from_peer: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)


def decode_from_lead(message: bytes) -> FromLead:
    """Raises msgspec.MsgspecError."""
    return _from_lead.decode(message)


def decode_from_peer(message: bytes) -> FromPeer:
    """Raises msgspec.MsgspecError."""
    return _from_peer.decode(message)
