"""The messages between the daemon and its hub process."""

from __future__ import annotations

from cortex.ipc.channel import ChannelMessage
from cortex.neuron.weights.errors import DownloadCorrupt, HubError, HubUnreachable, NoDiskSpace, NotOnHub
from cortex.neuron.weights.hub.listing import RemoteFile
from cortex.wire.node.neighbours import Neighbour

_ERRORS = {error.__name__: error for error in (HubError, NotOnHub, HubUnreachable, DownloadCorrupt, NoDiskSpace)}


class FetchFiles(ChannelMessage, frozen=True):
    """Files of a repository that the cache is to have."""

    endpoint: str
    repository: str
    commit: str
    files: tuple[RemoteFile, ...]
    cache_directory: str
    neighbours: tuple[Neighbour, ...] = ()
    uses_hub: bool = True


class Failed(ChannelMessage, frozen=True):
    """The HubError of this kind."""

    kind: str
    reason: str

    @classmethod
    def of(cls, error: HubError) -> Failed:
        return cls(type(error).__name__, str(error))

    @property
    def error(self) -> HubError:
        return _ERRORS.get(self.kind, HubError)(self.reason)
