"""Errors of commands: one line with the remedy, and an exit code for each kind.

A command raises `CommandError` or `SettingsError`; `run` prints it and chooses the exit code. Tracebacks are shown only
with `--verbose`.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import click
from rich.text import Text

from cortex.cli.output import PlainConsole
from cortex.settings import SettingsError
from cortex.system.exits import MEANINGS
from cortex.system.exits import ExitCode as ExitCode
from cortex.wire.words import os_error_in_words

VERBOSE_KEY = "cortex.verbose"


EXIT_CODES_HELP = f"Exit codes: {'; '.join(f'{code:d} {meaning}' for code, meaning in MEANINGS.items())}."


class CommandError(Exception):
    """A command failed. `message` says what happened, `remedy` what to do; together they are one line."""

    def __init__(self, message: str, remedy: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(f"{message}{'' if message.endswith('?') else ';'} {remedy}")
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code


HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class Command(click.Command):
    """A command with `-h` and `--verbose`. It rejects unknown variables of its program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"context_settings": HELP_OPTIONS, **kwargs})
        self.params.append(_verbose_option())

    def invoke(self, context: click.Context) -> Any:
        if "config" not in context.params:  # otherwise the configuration names more variables, and is checked with them
            check_environment()
        return super().invoke(context)


class Group(click.Group):
    """A group with `-h` and `--verbose`, like its commands, which are listed in the order they were added."""

    command_class = Command

    def __init__(self, *args: Any, check_environment: Callable[[Mapping[str, str]], None] | None = None, **kwargs: Any):
        """`check_environment` raises SettingsError for variables that the program does not know."""
        super().__init__(*args, **{"context_settings": HELP_OPTIONS, **kwargs})
        self.params.append(_verbose_option())
        self.check_environment = check_environment

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(self.commands)


Group.group_class = Group


def check_environment() -> None:
    """Raise SettingsError for a variable that the running program does not know."""
    program = click.get_current_context().find_root().command
    if isinstance(program, Group) and program.check_environment is not None:
        program.check_environment(os.environ)


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
    """Whether `--verbose` was given to the running command."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(VERBOSE_KEY))


class _OncePerMessage(logging.Filter):
    """Lets each message pass once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


def run(command: click.Command) -> None:
    """Run a program's command line and exit with its code. Never returns."""
    arguments = sys.argv[1:]
    if logging.lastResort is not None:
        # It prints the warnings of commands without a log of their own, which may read one configuration several times.
        logging.lastResort.addFilter(_OncePerMessage())
    try:
        result = command.main(args=arguments, prog_name=command.name, standalone_mode=False)
        # Without standalone mode the result is the return value of the command, or the code of `Context.exit`.
        sys.exit(result if isinstance(result, int) else ExitCode.OK)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Keep the interpreter from reporting that when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.OK)
    except (click.Abort, KeyboardInterrupt, CommandError, SettingsError, OSError) as error:
        if {"-v", "--verbose"} & set(arguments):
            traceback.print_exc()
        if line := explanation(error):
            console = PlainConsole(stderr=True, soft_wrap=True)
            console.print(Text.assemble((f"{command.name}: ", "red"), line))
        sys.exit(exit_code_of(error))


def explanation(error: BaseException) -> str:
    """One line for the user: what happened and what to do. Empty after an interrupt."""
    match error:
        case click.Abort() | KeyboardInterrupt():
            return ""
        case SettingsError():
            return error.message
        case OSError(errno=errno.ENOSPC):
            where = f" for {error.filename}" if error.filename else ""
            return f"no space left on the disk{where}; free some, or put the cache elsewhere with CORTEX_CACHE=/path"
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS, filename=str()):
            return f"{os_error_in_words(error)}; run it as a user who may do that, or change the permissions"
        case OSError(errno=errno.ENOENT | errno.ENOTDIR | errno.EISDIR | errno.EEXIST, filename=str()):
            return f"{os_error_in_words(error)}; check the path"
        case OSError():
            return f"{os_error_in_words(error)}; run again with --verbose to see where it happened"
        case _:
            return str(error)


def exit_code_of(error: BaseException) -> int:
    """The exit code of an error."""
    match error:
        case CommandError() | click.ClickException():
            return error.exit_code
        case SettingsError():
            return ExitCode.CONFIG
        case OSError(errno=errno.ENOSPC):
            return ExitCode.NO_ROOM
        case click.Abort() | KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case _:
            return ExitCode.FAILED
