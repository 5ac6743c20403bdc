"""`cortex bench`, and its results in `cortex explain`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from cortex.cli.failures import ExitCode

from ..canned_responses import fleet

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke

RESULT = {
    "measured_at": 1_700_000_000.0,
    "version": "1.2.3",
    "streams": [
        {"streams": 1, "tokens_per_s": 232.0, "share": 0.876},
        {"streams": 64, "tokens_per_s": 8263.4, "share": 0.004},
    ],
    "prompt_tokens": 2048,
    "prompt_tokens_per_s": 34_133.0,
    "prompt_share": None,
    "load_s": 41.0,
    "wake_s": 1.234,
    "bytes_per_s": 4.21e12,
    "flops": 7.8e14,
    "notes": ["8 streams: they do not fit"],
}


def can_measure(gateway: CannedGateway, model: str, **job: Any) -> None:
    made = {"id": f"job_{model}", "kind": "bench", "model": model, "nodes": ["beast"], "state": "done"}
    made |= {"results": {"beast": RESULT}} | job
    gateway.responses["POST", f"/fleet/models/{model}/bench"] = 202, {"model": model, "nodes": ["beast"], "job": made}
    gateway.responses["GET", f"/fleet/jobs/job_{model}"] = made


def shows_the_result(shown: str) -> None:
    assert "with version 1.2.3" in shown
    assert re.search(r"1 stream +232 tok/s +4.3 ms a token +88%\n", shown)
    assert re.search(r"64 streams +8,263 tok/s +7.7 ms a token +< 1%\n", shown)
    assert re.search(r"prompt of 2,048 tokens +34,133 tok/s +60 ms\n", shown)
    assert re.search(r"wake +1.23 s\n", shown)
    assert re.search(r"load +41 s\n", shown)
    assert "the limit, measured: 4.21 TB/s read, 780 TFLOP/s" in shown
    assert "8 streams: they do not fit" in shown


def test_shows_what_was_measured_and_sends_the_options(gateway: CannedGateway, invoke: Invoke) -> None:
    can_measure(gateway, "m")
    shown = invoke("bench", "m", "--node", "beast", "--force", "--no-reload").stdout
    assert shown.startswith("m on beast, measured 2023-11-")
    shows_the_result(shown)
    assert gateway.requests[0][2] == {"wait": False, "reload": False, "force": True, "node": "beast"}
    assert json.loads(invoke("bench", "m", "--json").stdout) == [{"model": "m", "results": {"beast": RESULT}}]


def test_without_a_name_measures_every_model_that_is_ready(gateway: CannedGateway, invoke: Invoke) -> None:
    ready = [{"id": name, "state": "ready"} for name in ("a", "b")]
    vectors = {"id": "embedder", "state": "ready", "capabilities": {"chat": False, "embeddings": True}}
    gateway.responses["GET", "/fleet/status"] = fleet(*ready, vectors, {"id": "c", "state": "asleep"})
    can_measure(gateway, "a")
    can_measure(gateway, "b")
    shown = invoke("bench").stdout
    assert re.findall(r"(\w+) on beast, measured", shown) == ["a", "b"]
    gateway.responses["GET", "/fleet/status"] = fleet()
    outcome = invoke("bench")
    assert outcome.code is ExitCode.NOT_FOUND
    assert "cortex bench MODEL" in outcome.error


def test_model_that_cannot_be_measured_does_not_keep_others_from_it(gateway: CannedGateway, invoke: Invoke) -> None:
    names = ("a", "b", "c", "d")
    gateway.responses["GET", "/fleet/status"] = fleet(*({"id": name, "state": "ready"} for name in names))
    served = {"code": "model_unsupported", "message": "a is run by a server of its own"}
    can_measure(gateway, "a", state="failed", error=served, results={})
    gateway.responses["POST", "/fleet/models/b/bench"] = 409, {"error": {"code": "model_in_use", "message": "b waits"}}
    can_measure(gateway, "c", state="failed", error={"code": "model_in_use", "message": "attic: c has 2 requests"})
    can_measure(gateway, "d")
    outcome = invoke("bench")
    assert re.findall(r"(\w+) on beast, measured", outcome.stdout) == ["c", "d"], "c has failed on another node"
    assert "3 of 4 models" in outcome.error
    listed = {"a": {}, "b": {}, "c": {"beast": RESULT}, "d": {"beast": RESULT}}
    assert json.loads(invoke("bench", "--json").stdout) == [
        {"model": name, "results": results} for name, results in listed.items()
    ]
    can_measure(gateway, "b")
    can_measure(gateway, "c")
    assert invoke("bench").code is ExitCode.OK, "of a server it is known that it is never measured"


def test_failure_is_the_reason_of_the_node(gateway: CannedGateway, invoke: Invoke) -> None:
    error = {"code": "model_in_use", "message": "m has 2 requests: wait until they have ended"}
    can_measure(gateway, "m", state="failed", error=error, results={})
    outcome = invoke("bench", "m")
    assert outcome.code is not ExitCode.OK
    assert "m has 2 requests" in outcome.error
    gateway.responses["GET", "/fleet/status"] = fleet({"id": "m", "state": "ready"}, {"id": "n", "state": "ready"})
    gateway.responses["POST", "/fleet/models/m/bench"] = 403, {"error": {"code": "forbidden", "message": "operators"}}
    assert "operators" in invoke("bench").error, "which holds for n, too"


def test_explain_shows_the_speed_on_each_node(gateway: CannedGateway, invoke: Invoke) -> None:
    node: dict[str, Any] = {"node": "beast", "verdict": "resident", "reason": "ready", "devices": [], "occupants": []}
    node |= {"need_bytes": None, "bench": RESULT}
    gateway.responses["GET", "/fleet/explain/m"] = {"at": 0, "node": "beast", "outcome": "routes", "nodes": [node]}
    shows_the_result(invoke("explain", "m").stdout)
