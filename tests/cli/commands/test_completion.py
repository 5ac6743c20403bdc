"""Shells complete commands, and names of models from the gateway's list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.shell_completion import ShellComplete

from cortex.cli.commands.completion import SHELLS
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
