"""What a peer may cost us, on each side of the relay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on client connections. Times are checked by the shared ticker, so they hold to within one tick."""

    num_connections: int = 8192
    """Connections open at once. Unix sockets, which our own programs use, do not count."""
    num_connections_per_client: int = 1024
    """Of them from one address; an IPv6 /64 network counts as one."""
    buffered_bytes: int = 1024 * 1024 * 1024
    """Request bytes that all connections together may hold: bodies until their exchange ends, and bytes sent ahead."""
    head_bytes: int = 64 * 1024
    """Request line and headers together."""
    num_headers: int = 128
    body_bytes: int = 64 * 1024 * 1024
    head_s: float = 10.0
    """From a request's first byte to the end of its head."""
    body_s: float = 30.0
    """Silence inside a body; also what a body may take in all, beyond the time that `body_bytes_per_s` gives it."""
    body_bytes_per_s: int = 16 * 1024
    """The slowest a body may come after its first `body_s`."""
    idle_s: float = 75.0
    """Between requests on a kept connection."""
    stall_s: float = 120.0
    """A client that reads nothing for so long while an answer waits for it is dropped."""
    linger_s: float = 3.0
    """How long a refused client may go on sending before its connection closes, so that it can read why."""
    write_buffer_bytes: int = 256 * 1024
    """Unsent answer bytes above which the upstream is paused."""


class Buffered:
    """Request bytes that all connections of one server hold now. Each connection adds its own and takes them out."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Bounds on one node's connections."""

    connect_s: float = 5.0
    silence_s: float = 600.0
    """A node that sends nothing for so long while an answer is due is given up. There is no total timeout."""
    keep_s: float = 30.0
    """An unused connection is closed after this; keep it under the node's own keep-alive."""
    num_kept: int = 256
    """Unused connections kept for reuse."""
    head_bytes: int = 64 * 1024
    fetch_body_bytes: int = 16 * 1024 * 1024
    """The longest body that `Pool.fetch` collects."""
