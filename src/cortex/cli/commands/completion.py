"""`cortex completion`: the script that completes commands, options and model names in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from cortex.cli.failures import Command

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_CORTEX_COMPLETE"


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
      eval "$(cortex completion bash)"      # in ~/.bashrc
      eval "$(cortex completion zsh)"       # in ~/.zshrc
      cortex completion fish | source       # in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click has all three
    program = click.get_current_context().find_root().command
    click.echo(kind(program, {}, "cortex", _VARIABLE).source())
