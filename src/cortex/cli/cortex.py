"""The command `cortex` and its subcommands."""

from __future__ import annotations

import click

from cortex import __version__
from cortex.cli.commands.audit import audit
from cortex.cli.commands.bench import bench
from cortex.cli.commands.cancel import cancel
from cortex.cli.commands.chat import chat
from cortex.cli.commands.completion import completion
from cortex.cli.commands.doctor.command import doctor
from cortex.cli.commands.embed import embed
from cortex.cli.commands.explain import explain
from cortex.cli.commands.files import pull, rm
from cortex.cli.commands.keys import keys
from cortex.cli.commands.launch import launch
from cortex.cli.commands.load import load, move, pin, unload, unpin
from cortex.cli.commands.logs import logs
from cortex.cli.commands.models import models
from cortex.cli.commands.nodes import drain, jobs, ps, undrain
from cortex.cli.commands.run import run as run_model
from cortex.cli.commands.serve import serve
from cortex.cli.commands.status import status
from cortex.cli.commands.usage import usage
from cortex.cli.failures import EXIT_CODES_HELP, Group, run
from cortex.cli.importing.command import import_configuration
from cortex.cli.up.command import up
from cortex.gateway.config import check_environment


@click.group(cls=Group, name="cortex", epilog=EXIT_CODES_HELP, check_environment=check_environment)
@click.version_option(__version__, prog_name="cortex")
def cortex() -> None:
    """One OpenAI + Anthropic endpoint over a handful of mismatched GPU boxes."""


_LOOK = (status, ps, models, logs, jobs, explain, bench, doctor)
_USE = (run_model, chat, embed, launch)
_CONTROL = (load, unload, cancel, pin, unpin, move, pull, rm, drain, undrain)

for command in (up, *_LOOK, *_USE, *_CONTROL, keys, usage, audit, serve, import_configuration, completion):
    cortex.add_command(command)
cortex.add_command(unload, "stop")  # as users of Ollama call it


def main() -> None:
    run(cortex)


if __name__ == "__main__":
    main()
