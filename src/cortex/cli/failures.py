"""How a command ends: exit codes that mean something, and errors as one line with the remedy.

A command raises `CommandError` (or lets a `SettingsError` through); `run` prints it and picks the exit code.
The traceback is shown only with `--verbose`.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from enum import IntEnum
from typing import Any

import click
from rich.console import Console

from cortex.settings import SettingsError

VERBOSE_KEY = "cortex.verbose"


class ExitCode(IntEnum):
    """What a script may rely on."""

    OK = 0
    FAILED = 1
    """What was asked for did not work."""
    USAGE = 2
    """The command line is wrong."""
    CONFIG = 3
    """A configuration file is missing or wrong."""
    UNREACHABLE = 4
    """The gateway, a node or the network did not answer."""
    NOT_FOUND = 5
    """No such model."""
    DENIED = 6
    """The key is missing, wrong or not allowed."""
    NO_ROOM = 7
    """A port, disk space or device memory is taken."""
    INTERRUPTED = 130


EXIT_CODES_HELP = """\b
Exit codes: 0 done, 1 failed, 2 wrong command line, 3 wrong configuration, 4 no answer from gateway, node or network,
5 no such model, 6 key refused, 7 no room (port, disk, memory), 130 interrupted.
"""


class CommandError(Exception):
    """A command cannot go on. `message` says what happened, `remedy` what to do; both fit one line."""

    def __init__(self, message: str, remedy: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(f"{message}; {remedy}")
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code


class Command(click.Command):
    """A command that takes `--verbose` wherever the user puts it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_verbose_option())


class Group(click.Group):
    """A group whose commands all take `--verbose`."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_verbose_option())


Group.group_class = Group


def _verbose_option() -> click.Option:
    def remember(context: click.Context, _parameter: click.Parameter, verbose: bool) -> None:
        if verbose:
            context.meta[VERBOSE_KEY] = True

    return click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Show tracebacks and the programs' own logs.",
    )


def is_verbose() -> bool:
    """Whether the running command was asked to show more."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(VERBOSE_KEY))


def run(command: click.Command) -> None:
    """Run a program's command line and exit with its code. Never returns."""
    sys.exit(_run(command, sys.argv[1:]))


def _run(command: click.Command, arguments: list[str]) -> int:
    try:
        result = command.main(args=arguments, standalone_mode=False)
        # `standalone_mode=False` gives back what the command returned, or the code of `Context.exit`.
        return result if isinstance(result, int) else ExitCode.OK
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except CommandError as error:
        return _say(command, f"{error.message}; {error.remedy}", error.exit_code, arguments)
    except SettingsError as error:
        return _say(command, error.message, ExitCode.CONFIG, arguments)
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except OSError as error:
        if error.errno == errno.ENOSPC:
            remedy = "free some space, or put the cache elsewhere with CORTEX_CACHE=/path"
            return _say(
                command,
                f"no space left on the disk ({error.filename or 'writing'}); {remedy}",
                ExitCode.NO_ROOM,
                arguments,
            )
        return _say(command, f"{error}; run again with --verbose for where it happened", ExitCode.FAILED, arguments)


def _say(command: click.Command, line: str, code: ExitCode, arguments: list[str]) -> int:
    if {"-v", "--verbose"} & set(arguments):
        traceback.print_exc()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[red]{command.name}:[/red] ", end="")
    console.print(line, markup=False)
    return code
