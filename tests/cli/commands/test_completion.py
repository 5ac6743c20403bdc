"""Shells complete commands, and names of models from the gateway's list."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.shell_completion import ShellComplete

from cortex.cli.commands.serve import SHELLS
from cortex.cli.cortex import cortex

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke


def completions(*words: str) -> list[str]:
    *before, incomplete = words
    found = ShellComplete(cortex, {}, "cortex", "_CORTEX_COMPLETE").get_completions(before, incomplete)
    return [item.value for item in found]


@pytest.mark.parametrize("shell", SHELLS)
def test_script_calls_the_program_again(invoke: Invoke, shell: str) -> None:
    outcome = invoke("completion", shell)
    assert outcome.code == 0
    assert f"_CORTEX_COMPLETE={shell}_complete" in outcome.stdout


def test_completes_commands_and_models(gateway: CannedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORTEX_URL", gateway.url)
    gateway.responses["GET", "/v1/models"] = {"data": [{"id": "org/big"}, {"id": "org/small"}, {"id": "other"}]}
    assert completions("sto") == ["stop"]
    assert completions("stop", "org/") == ["org/big", "org/small"]
    assert completions("run", "oth") == ["other"]


def test_completes_nothing_without_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORTEX_URL", "http://127.0.0.1:9")
    assert completions("stop", "") == []


IN_BASH = """
eval "$SCRIPT"
COMP_LINE=$1 COMP_POINT=${#1}
_cortex_completion cortex
printf '%s\\n' "${COMPREPLY[@]}"
"""
IN_ZSH = """
compdef() { }
compadd() { print -rl -- ${(P)argv[-1]} }
eval "$SCRIPT"
words=("${(@s: :)1}") CURRENT=${#words}
_cortex_completion
"""
IN_FISH = "echo $SCRIPT | source; complete -C $argv[1]"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cortex stop org/", ["org/big", "org/small:q4", "org/small:q8"]),
        ("cortex launch claude --model oth", ["other"]),
        ("cortex run org/small:", ["org/small:q4", "org/small:q8"]),
    ],
)
def test_shell_proposes_names_of_models(
    gateway: CannedGateway, invoke: Invoke, tmp_path: Path, shell: str, line: str, expected: list[str]
) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    names = ("org/big", "org/small:q4", "org/small:q8", "other")
    gateway.responses["GET", "/v1/models"] = {"data": [{"id": name} for name in names]}
    command = tmp_path / "cortex"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cortex.cli.cortex "$@"\n')
    command.chmod(0o755)
    script = invoke("completion", shell).stdout
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "CORTEX_URL": gateway.url, "PATH": path, "SCRIPT": script}
    arguments = {"bash": [IN_BASH, "bash"], "zsh": [IN_ZSH, "zsh"], "fish": [IN_FISH]}[shell]
    done = subprocess.run(
        [program, "-c", *arguments, line], env=environment, capture_output=True, text=True, check=False
    )
    if shell == "bash":  # readline keeps what is before the last colon
        expected = [name.removeprefix("org/small:") if line.endswith(":") else name for name in expected]
    assert done.stdout.split() == expected, done.stderr
