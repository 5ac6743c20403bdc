"""The messages between the lead of a model that spans nodes and a peer, over one connection for each load.

The lead sends `PrepareShare`; the peer finds files and devices, where no other load runs from then on, and replies
with `SharePrepared`. `LoadShare` follows when all peers are ready; the reply is `ShareLoaded`. Each reply may be
`ShareFailed` or `ShareLost` instead. A loaded share sleeps and wakes with its model: the replies to `SleepShare` and
`WakeShare` are `ShareSlept` and `ShareWoken`, or `ShareFailed` if it stays as it is. `UnloadShare` ends the share at
any time; the reply is `ShareUnloaded`. `KillShare` ends it with its workers, and `ShareLost` follows.
A peer that shuts down sends `ShareEnding`, and waits a while for `UnloadShare`: requests end first.
A connection that ends is the loss of the share: the lead replaces the group, the peer frees its part.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.worker.faults import FaultKind
from cortex.wire.errors import LoadFailed
from cortex.wire.node.orders import LoadRequest


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


class PrepareShare(ShareMessage, frozen=True):
    request: LoadRequest
    digest: str
    """The digest of the model's configuration on the lead: the files of both nodes must be the same."""


class LoadShare(ShareMessage, frozen=True):
    spec: LoadSpec
    """As of the lead, with the first rank of the share. The peer has its own files, memory limits and address."""


class SleepShare(ShareMessage, frozen=True):
    pass


class WakeShare(ShareMessage, frozen=True):
    pass


class UnloadShare(ShareMessage, frozen=True):
    pass


class KillShare(ShareMessage, frozen=True):
    reason: str


class SharePrepared(ShareMessage, frozen=True):
    free_bytes: tuple[int, ...] = ()
    """What each device can give, if the model is divided by layers."""
    limits: tuple[int | None, ...] = ()
    """The operator's ceiling of each device then."""


class ShareLoaded(ShareMessage, frozen=True):
    notes: tuple[str, ...] = ()


class ShareSlept(ShareMessage, frozen=True):
    pass


class ShareWoken(ShareMessage, frozen=True):
    pass


class ShareFailed(ShareMessage, frozen=True):
    kind: FaultKind
    message: str
    cancelled: bool = False
    has_room_elsewhere: bool = False
    """It cannot wake on its devices, but could be loaded on others."""


class ShareLost(ShareMessage, frozen=True):
    reason: str


class ShareUnloaded(ShareMessage, frozen=True):
    pass


class ShareEnding(ShareMessage, frozen=True):
    pass


FromLead = PrepareShare | LoadShare | SleepShare | WakeShare | UnloadShare | KillShare
FromPeer = SharePrepared | ShareLoaded | ShareSlept | ShareWoken | ShareFailed | ShareLost | ShareUnloaded | ShareEnding

encode = msgspec.msgpack.Encoder().encode
_from_lead: msgspec.msgpack.Decoder[FromLead] = msgspec.msgpack.Decoder(FromLead)
_from_peer: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)


def decode_from_lead(message: bytes) -> FromLead:
    """Raises msgspec.MsgspecError."""
    return _from_lead.decode(message)


def decode_from_peer(message: bytes) -> FromPeer:
    """Raises msgspec.MsgspecError."""
    return _from_peer.decode(message)
