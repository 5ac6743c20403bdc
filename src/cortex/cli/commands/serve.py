"""`cortex serve`: the gateway alone, as a service runs it. `cortex completion`: the script that completes commands in a
shell."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.output import file_here
from cortex.cli.up.run_files import address


@click.command(cls=Command)
@click.option(
    "-c", "--config", type=click.Path(path_type=Path), help="A cortex.toml. [default: ./cortex.toml if there is one]"
)
@click.option("--ollama", is_flag=True, help="Also listen on port 11434, where clients of Ollama look by default.")
@click.option("--take-over", is_flag=True, help="Share the addresses of a running gateway, which you then stop.")
def serve(config: Path | None, ollama: bool, take_over: bool) -> None:
    """Run the gateway until SIGTERM or Ctrl-C.

    SIGHUP, or a change of a file, reloads the configuration.
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


SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_CORTEX_COMPLETE"

# Bash ends words at colons, which names of models have: the words are those of the line, and what readline keeps, the
# part before the last colon, is not part of a reply.
_BASH = """\
_cortex_completion() {
    local line=${COMP_LINE:0:COMP_POINT} replies kind value kept
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    value=${words[-1]}
    kept=${value%"${value##*:}"}
    [[ $COMP_WORDBREAKS == *:* ]] || kept=
    local IFS=$'\\n'
    replies=$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) _CORTEX_COMPLETE=bash_complete "$1")
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$kept"}") ;;
        esac
    done <<< "$replies"
}
complete -o nosort -F _cortex_completion cortex
"""


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
      eval "$(cortex completion bash)"      # in ~/.bashrc
      eval "$(cortex completion zsh)"       # in ~/.zshrc
      cortex completion fish | source       # in ~/.config/fish/config.fish
    """
    if shell == "bash":
        click.echo(_BASH)
        return
    kind = get_completion_class(shell)
    assert kind is not None  # click has both
    program = click.get_current_context().find_root().command
    click.echo(kind(program, {}, "cortex", _VARIABLE).source())
