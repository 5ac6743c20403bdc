"""`python -m cortex.neuron --config FILE`: runs the daemon in the foreground."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Blocks until a signal ends the daemon. Returns OK, NO_ROOM when the address cannot be bound, or CONFIG when the
    configuration cannot be used; an error is one line on standard error."""
    gc.disable()  # imports leave little garbage, and its collection takes a seventh of the time
    import uvloop

    from cortex.neuron import config
    from cortex.neuron.api import server
    from cortex.settings import SettingsError
    from cortex.system.exits import ExitCode
    from cortex.telemetry import logs

    gc.freeze()
    gc.enable()
    parser = argparse.ArgumentParser(prog="python -m cortex.neuron", description="One node of a cortex fleet.")
    parser.add_argument("--config", type=Path, help="a neuron.toml; without it, defaults and the environment")
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    options = parser.parse_args(arguments)
    logs.hold()
    try:
        settings = config.load(options.config)
        uvloop.run(server.serve(settings, options.config, insecure=options.insecure))
    except (SettingsError, server.CannotListen) as problem:
        print(f"neuron: {problem}", file=sys.stderr)
        return ExitCode.CONFIG if isinstance(problem, SettingsError) else ExitCode.NO_ROOM
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
