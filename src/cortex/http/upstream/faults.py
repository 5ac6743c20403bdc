"""How talking to a node can fail. The caller decides what a client is told."""

from __future__ import annotations


class UpstreamFault(Exception):
    """The node did not answer, or not to the end. The text says what happened and names the origin."""


class ConnectFailed(UpstreamFault):
    """No connection: refused, unreachable, unknown name, TLS failure, or not within `connect_s`."""


class ConnectionLost(UpstreamFault):
    """The node closed or reset the connection before its answer was complete."""


class UpstreamSilent(UpstreamFault):
    """The node sent nothing for `silence_s` while an answer was due."""


class MalformedResponse(UpstreamFault):
    """What came back is not HTTP, is framed ambiguously, or has a head over the limit."""
