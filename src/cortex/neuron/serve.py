"""Running the daemon to its end, as a program does."""

from __future__ import annotations

import sys

import uvloop

from cortex.exits import ExitCode
from cortex.neuron.api import server
from cortex.neuron.config import NeuronConfig


def serve(config: NeuronConfig) -> int:
    """Blocks until a signal ends the daemon. The exit code: OK when it ended as told, NO_ROOM without its address."""
    try:
        uvloop.run(server.serve(config))
    except server.CannotListen as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return ExitCode.NO_ROOM
    return ExitCode.OK
