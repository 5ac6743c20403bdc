"""`python -m cortex.neuron --config FILE`: runs the daemon in the foreground."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cortex.exits import ExitCode
from cortex.neuron import config
from cortex.neuron.serve import serve
from cortex.settings import SettingsError
from cortex.telemetry import logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; an error is one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m cortex.neuron", description="One node of a cortex fleet.")
    parser.add_argument("--config", type=Path, help="a neuron.toml; without it, defaults and the environment")
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    options = parser.parse_args(arguments)
    logs.hold()
    try:
        settings = config.load(options.config)
    except SettingsError as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return ExitCode.CONFIG
    return serve(settings, options.config, insecure=options.insecure)


if __name__ == "__main__":
    sys.exit(main())
