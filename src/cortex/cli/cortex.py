"""The command `cortex`: its group, and what belongs to it."""

from __future__ import annotations

import click

from cortex import __version__

from .chat import chat
from .doctor import doctor
from .explain import explain
from .failures import EXIT_CODES_HELP, Group, run
from .keys import keys
from .lifecycle import load, pin, unload, unpin
from .models import models
from .serve import serve
from .status import status
from .up import up
from .usage import usage


@click.group(cls=Group, name="cortex", epilog=EXIT_CODES_HELP)
@click.version_option(__version__, prog_name="cortex")
def cortex() -> None:
    """One OpenAI + Anthropic endpoint over a handful of mismatched GPU boxes."""


for command in (up, status, models, chat, load, unload, pin, unpin, explain, doctor, keys, usage, serve):
    cortex.add_command(command)


def main() -> None:
    run(cortex)


if __name__ == "__main__":
    main()
