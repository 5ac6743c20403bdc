"""`python -m cortex.neuron --config FILE`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from cortex.neuron import config as neuron_config
from cortex.neuron.api.server import ListenFailed, serve
from cortex.settings import SettingsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until a signal ends it. 0: ended as told; 1: could not start; 2: the configuration is wrong."""
    parser = argparse.ArgumentParser(prog="python -m cortex.neuron", description="One node of a cortex fleet.")
    parser.add_argument("--config", type=Path, help="a neuron.toml; defaults and the environment when absent")
    options = parser.parse_args(arguments)
    try:
        config = neuron_config.load(options.config)
    except SettingsError as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return 2
    try:
        uvloop.run(serve(config))
    except ListenFailed as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
