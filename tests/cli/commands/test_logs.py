"""`cortex logs` of a model that a server runs: the server's output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cortex.cli.failures import ExitCode

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke

PATH = "/fleet/models/org/m/log"
NOTHING = {"requests": [], "next": 0}


def page(*lines: str, after: int) -> dict[str, object]:
    return {"model": "org/m", "nodes": [{"node": "box", "lines": lines, "next": after}]}


def test_output_precedes_the_requests(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/activity?model=org%2Fm&limit=2&after=0"] = NOTHING
    gateway.responses["GET", PATH] = page("one", "two", "three", after=3)
    shown = invoke("logs", "--model", "org/m", "-n", "2").stdout.splitlines()
    assert shown == ["box | two", "box | three", "", "no matching requests"]
    lines = invoke("logs", "--model", "org/m", "--server", "--json").stdout.splitlines()
    assert json.loads(lines[-1]) == {"node": "box", "line": "three"}
    assert len(lines) == 3


def test_followed_output_is_shown_once(gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.responses["GET", PATH] = page("one", after=1)
    gateway.responses["GET", f"{PATH}?node=box&after=1"] = page("two", after=2)
    gateway.responses["GET", f"{PATH}?node=box&after=2"] = page(after=2)
    sleeps = iter(range(3))

    def sleep(_seconds: float) -> None:
        if next(sleeps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("cortex.cli.commands.logs.time.sleep", sleep)
    outcome = invoke("logs", "--model", "org/m", "--server", "-f")
    assert (outcome.code, outcome.stdout.splitlines()) == (ExitCode.INTERRUPTED, ["box | one", "box | two"])


def test_the_reason_why_there_is_no_output(gateway: CannedGateway, invoke: Invoke) -> None:
    error = {"error": {"message": "org/m is run by the built-in engine", "code": "invalid_value"}}
    gateway.responses["GET", PATH] = (400, error)
    outcome = invoke("logs", "--model", "org/m", "--server")
    assert outcome.code is not ExitCode.OK
    assert "built-in engine" in outcome.error
    assert invoke("logs", "--server").code is ExitCode.USAGE
