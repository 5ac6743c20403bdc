"""Runs the daemon as a program: event loop and exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from cortex.exits import ExitCode
from cortex.neuron.api import server
from cortex.neuron.config import NeuronConfig
from cortex.settings import SettingsError


def serve(config: NeuronConfig, path: Path | None = None, *, insecure: bool = False) -> int:
    """Blocks until a signal ends the daemon. Returns OK, NO_ROOM when the address cannot be bound, or CONFIG when the
    configuration cannot be used. `path` is the file of `config`."""
    try:
        uvloop.run(server.serve(config, path, insecure=insecure))
    except SettingsError as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return ExitCode.CONFIG
    except server.CannotListen as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return ExitCode.NO_ROOM
    return ExitCode.OK
