"""Runs the daemon as a program: event loop and exit code."""

from __future__ import annotations

import sys

import uvloop

from cortex.exits import ExitCode
from cortex.neuron.api import server
from cortex.neuron.config import NeuronConfig


def serve(config: NeuronConfig) -> int:
    """Blocks until a signal ends the daemon. Returns OK, or NO_ROOM when the address cannot be bound."""
    try:
        uvloop.run(server.serve(config))
    except server.CannotListen as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return ExitCode.NO_ROOM
    return ExitCode.OK
