"""The command `cortex` and its subcommands."""

from __future__ import annotations

from importlib import import_module

import click

from cortex import __version__
from cortex.cli.failures import EXIT_CODES_HELP, Group, run
from cortex.gateway.config import check_environment

_LOOK = {
    "status": "commands.status:status",
    "nodes": "commands.nodes:nodes",
    "ps": "commands.nodes:ps",
    "models": "commands.models:models",
    "logs": "commands.logs:logs",
    "jobs": "commands.nodes:jobs",
    "explain": "commands.load:explain",
    "fits": "commands.load:fits",
    "bench": "commands.bench:bench",
    "doctor": "commands.doctor.command:doctor",
}
_USE = {
    "run": "commands.run:run",
    "chat": "commands.chat:chat",
    "embed": "commands.chat:embed",
    "batch": "commands.batch:batch",
    "launch": "commands.launch:launch",
}
_CONTROL = {
    "load": "commands.load:load",
    "create": "importing.create:create",
    "unload": "commands.load:unload",
    "cancel": "commands.status:cancel",
    "pin": "commands.load:pin",
    "unpin": "commands.load:unpin",
    "move": "commands.load:move",
    "pull": "commands.run:pull",
    "copy": "commands.run:copy",
    "rm": "commands.run:rm",
    "drain": "commands.nodes:drain",
    "undrain": "commands.nodes:undrain",
    "forget": "commands.run:forget",
    "forget-size": "commands.load:forget_size",
}
_ADMINISTER = {
    "keys": "commands.keys:keys",
    "usage": "commands.logs:usage",
    "audit": "commands.logs:audit",
    "serve": "commands.serve:serve",
    "import": "importing.command:import_configuration",
    "completion": "commands.serve:completion",
    "stop": "commands.load:unload",  # as users of Ollama call it
}
_COMMANDS = {"up": "up.command:up", **_LOOK, **_USE, **_CONTROL, **_ADMINISTER}
"""Name → module and attribute, in the order of the help."""


class _Program(Group):
    """Imports commands lazily: importing all would double the delay of most commands and of every completion."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        for needed in [name] if name in _COMMANDS else _COMMANDS:  # for an unknown name Click suggests one of all
            if needed not in self.commands:
                module, _, attribute = _COMMANDS[needed].partition(":")
                self.add_command(getattr(import_module(f"cortex.cli.{module}"), attribute), needed)
        return super().get_command(context, name)


@click.group(cls=_Program, name="cortex", epilog=EXIT_CODES_HELP, check_environment=check_environment)
@click.version_option(__version__, prog_name="cortex")
def cortex() -> None:
    """One OpenAI + Anthropic endpoint over a handful of mismatched GPU boxes."""


def main() -> None:
    run(cortex)


if __name__ == "__main__":
    main()
