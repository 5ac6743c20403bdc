"""`python -m cortex.gateway --config cortex.toml`: the gateway, without the rest of the command line."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code, after one line on standard error if something failed."""
    gc.disable()  # imports leave little garbage, and its collection takes a seventh of the time
    import uvloop

    from cortex.gateway import config as configuration
    from cortex.gateway.database import StoreError
    from cortex.gateway.listening import CannotListen
    from cortex.gateway.process import serve
    from cortex.settings import SettingsError
    from cortex.system.exits import ExitCode
    from cortex.telemetry import logs

    gc.freeze()
    gc.enable()
    parser = argparse.ArgumentParser(prog="cortex.gateway", description="One endpoint over a fleet of GPU hosts.")
    parser.add_argument("--config", type=Path, help="cortex.toml; defaults and CORTEX_… variables apply without it")
    parser.add_argument(
        "--take-over", action="store_true", help="share the addresses of a running gateway, which you then stop"
    )
    options = parser.parse_args(arguments)
    path: Path | None = options.config
    logs.hold()
    try:
        uvloop.run(serve(configuration.load(path, os.environ), path, takes_over=options.take_over))
    except SettingsError as problem:
        print(f"cortex: {problem}", file=sys.stderr)
        return ExitCode.CONFIG
    except StoreError as problem:
        print(f"cortex: {problem}", file=sys.stderr)
        return problem.exit_code
    except CannotListen as problem:
        print(f"cortex: {problem}", file=sys.stderr)
        return ExitCode.NO_ROOM
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
