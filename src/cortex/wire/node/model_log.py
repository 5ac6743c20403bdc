"""The response of `/models/{id}/log` of a node."""

from __future__ import annotations

from cortex.wire.node.protocol import NodeValue


class ModelLog(NodeValue, frozen=True):
    """The output of the server that runs a model."""

    lines: tuple[str, ...] = ()
    """Oldest first."""
    next: int = 0
    """How many lines there were in all, empty ones too: `after` for those that follow."""
