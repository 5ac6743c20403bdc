"""Messages between a thread of the daemon and its hub process: each request gets one reply."""

from __future__ import annotations

from typing import TypeAlias

from cortex.ipc.channel import ChannelMessage
from cortex.neuron.weights.errors import DownloadCorrupt, HubError, HubUnreachable, NoDiskSpace, NotOnHub
from cortex.neuron.weights.hub.listing import Listing, RemoteFile

_ERRORS = {error.__name__: error for error in (HubError, NotOnHub, HubUnreachable, DownloadCorrupt, NoDiskSpace)}


class ListFiles(ChannelMessage, frozen=True):
    """Asks for the listing of a repository; `Listed` or `Failed` follows."""

    endpoint: str
    repository: str
    revision: str


class FetchFiles(ChannelMessage, frozen=True):
    """Asks for files in the cache, verified and linked into the commit's snapshot; `Fetched` or `Failed` follows."""

    endpoint: str
    repository: str
    commit: str
    files: tuple[RemoteFile, ...]
    cache_directory: str


class Listed(ChannelMessage, frozen=True):
    listing: Listing


class Fetched(ChannelMessage, frozen=True):
    pass


class Failed(ChannelMessage, frozen=True):
    kind: str
    reason: str

    @classmethod
    def of(cls, error: HubError) -> Failed:
        return cls(type(error).__name__, str(error))

    @property
    def error(self) -> HubError:
        return _ERRORS.get(self.kind, HubError)(self.reason)


HubRequest: TypeAlias = ListFiles | FetchFiles
HubReply: TypeAlias = Listed | Fetched | Failed
