"""Running the daemon to its end, as a program does."""

from __future__ import annotations

import sys

import uvloop

from cortex.neuron.api import server
from cortex.neuron.config import NeuronConfig


def serve(config: NeuronConfig) -> int:
    """Blocks until a signal ends the daemon. The exit status: 0 when it ended as told, 1 when it could not start."""
    try:
        uvloop.run(server.serve(config))
    except server.CannotListen as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return 1
    return 0
