"""`cortex serve`: the gateway alone, as a service runs it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.output import file_here
from cortex.cli.up.run_files import address


@click.command(cls=Command)
@click.option(
    "-c", "--config", type=click.Path(path_type=Path), help="A cortex.toml. [default: ./cortex.toml if there is one]"
)
@click.option("--ollama", is_flag=True, help="Also listen on Ollama's port, 11434, where clients look by themselves.")
@click.option(
    "--take-over", is_flag=True, help="Listen on the addresses of a gateway that runs already, which you then stop."
)
def serve(config: Path | None, ollama: bool, take_over: bool) -> None:
    """Run the gateway until SIGTERM or Ctrl-C.

    SIGHUP or a change of the file reloads the configuration.
    """
    import uvloop

    from cortex.gateway.config import load
    from cortex.gateway.database import StoreError
    from cortex.gateway.listening import CannotListen
    from cortex.gateway.process import serve as serve_gateway
    from cortex.telemetry import logs
    from cortex.wire.dialects.ollama.models import PORT

    config = config or file_here("cortex.toml")
    logs.hold()
    if ollama:
        section = load(config, os.environ).gateway
        if section.ollama_listen is None:
            os.environ["CORTEX_GATEWAY__OLLAMA_LISTEN"] = address(section.listen.host, PORT)
    try:
        uvloop.run(serve_gateway(load(config, os.environ), config, takes_over=take_over))
    except CannotListen as error:
        what, _, remedy = str(error).partition("; ")
        raise CommandError(what, remedy, ExitCode.NO_ROOM) from error
    except StoreError as error:
        raise CommandError(
            str(error), "check `gateway.state` and `ledger.database` in the configuration", error.exit_code
        ) from error
