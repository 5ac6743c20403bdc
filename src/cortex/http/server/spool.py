"""A request body that is too long for memory: a file that grows as the body arrives."""

from __future__ import annotations

from cortex.http.composed_body import ComposedBody, FileRange, new_spool
from cortex.http.limits import ClientShares
from cortex.wire.errors import CortexError, Overloaded


class BodySpool:
    """Adds its bytes to those that `client` has in `spooled`; who takes the body, or drops it, subtracts them."""

    __slots__ = ("_client", "_file", "_num_bytes", "_spooled")

    def __init__(self, spooled: ClientShares, client: str) -> None:
        """Raises OSError."""
        self._spooled = spooled
        self._client = client
        self._num_bytes = 0
        self._file = new_spool()

    def write(self, data: bytes) -> CortexError | None:
        """Returns why the body is rejected."""
        self._num_bytes += len(data)
        self._spooled.add(self._client, len(data))
        if not self._spooled.has_room(self._client):
            return no_room("on disk")
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            return cannot_spool(error)
        return None

    def taken(self) -> ComposedBody:
        """The whole body, for the request."""
        return ComposedBody((FileRange(self._file, 0, self._num_bytes),))

    def drop(self) -> None:
        self._file.close()
        self._spooled.add(self._client, -self._num_bytes)


def no_room(where: str = "in memory") -> Overloaded:
    """The error for a request whose body would exceed the limit on all bodies."""
    return Overloaded(f"the request bodies {where} have reached their limit; try again in a moment")


def cannot_spool(error: OSError) -> Overloaded:
    return Overloaded(f"the request body cannot be written to disk ({error.strerror}); try again later")
