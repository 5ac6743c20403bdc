"""`cortex cancel`: lists requests that run, and ends them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cortex.cli.failures import ExitCode

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke

PATH = "/fleet/activity/running"


def running(id: str, model: str = "a") -> dict[str, Any]:
    return {
        "id": id,
        "key": "anna",
        "model": model,
        "node": "beast",
        "dialect": "openai_chat",
        "path": "/v1/chat/completions",
        "stream": True,
        "phase": "decode",
        "duration_s": 65.0,
        "attempts": 1,
    }


def test_without_an_id_it_lists_what_runs(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", PATH] = {"requests": [running("req_1")]}
    shown = invoke("cancel").stdout
    assert "req_1" in shown
    assert "generates" in shown
    assert json.loads(invoke("cancel", "--json").stdout)[0]["id"] == "req_1"
    gateway.responses["GET", PATH] = {"requests": []}
    assert invoke("cancel").stdout == "no requests run\n"
    assert all(method == "GET" for method, *_ in gateway.requests)


@pytest.mark.parametrize(
    ("arguments", "ended"),
    [(["req_1"], ["req_1"]), (["req_1", "req_3"], ["req_1", "req_3"]), (["--model", "b"], ["req_2", "req_3"])],
)
def test_ends_what_is_named(gateway: CannedGateway, invoke: Invoke, arguments: list[str], ended: list[str]) -> None:
    gateway.responses["GET", PATH] = {"requests": [running("req_1"), running("req_2", "b"), running("req_3", "b")]}
    for id in ("req_1", "req_2", "req_3"):
        gateway.responses["DELETE", f"{PATH}/{id}"] = {"cancelled": 1}
    outcome = invoke("cancel", *arguments)
    assert outcome.code is ExitCode.OK
    assert f"{len(ended)} request" in outcome.stdout
    assert [path.rpartition("/")[2] for method, path, *_ in gateway.requests if method == "DELETE"] == ended


def test_request_that_does_not_run_is_not_found(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", PATH] = {"requests": []}
    outcome = invoke("cancel", "req_9")
    assert outcome.code is ExitCode.NOT_FOUND
    assert "req_9" in outcome.error


def test_request_that_has_just_ended_is_no_error(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", PATH] = {"requests": [running("req_1")]}
    assert invoke("cancel", "req_1").stdout == "0 requests cancelled\n"
