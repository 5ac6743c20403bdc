"""`cortex completion`: the script that completes commands, options and model names in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from cortex.cli.failures import Command

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
