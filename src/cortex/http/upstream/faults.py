"""How a call to a node can fail. The caller decides what the client gets."""

from __future__ import annotations


class UpstreamFault(Exception):
    """The node did not respond, or not completely. The message says what happened and names the origin."""


class ConnectFailed(UpstreamFault):
    """No connection: refused, unreachable, unknown name, TLS failure, or not within `connect_s`."""


class ConnectionLost(UpstreamFault):
    """The node closed or reset the connection before its response was complete."""


class UpstreamSilent(UpstreamFault):
    """The node sent nothing for `silence_s` while a response was due."""


class MalformedResponse(UpstreamFault):
    """The response is not HTTP, is framed ambiguously, or has a head over the limit."""


class ResponseTooLarge(MalformedResponse):
    """The response is larger than what the gateway holds in memory. Another attempt would be too."""


class NotAdmitted(UpstreamFault):
    """The node rejected the caller itself, not the request: a key is missing or wrong."""
