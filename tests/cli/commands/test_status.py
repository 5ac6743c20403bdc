"""Commands that show the state of a fleet: models, ps, status, explain, logs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cortex.cli.failures import ExitCode

from ..canned_responses import LOADING, MODELS, READY, WHY, fleet

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke


def test_models_shows_nodes_that_hold_or_could_hold_each_model(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/v1/models"] = MODELS
    shown = invoke("models").stdout
    assert "fast → small" in shown
    assert "8,192" in shown
    assert "beast (2 replicas" in shown
    assert "(beast, attic)" in shown
    assert "fits nowhere" in shown


def test_models_as_json_is_the_response_of_the_gateway(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/v1/models"] = MODELS
    assert json.loads(invoke("models", "--json").stdout) == MODELS["data"]


def test_status_warns_of_a_loaded_model_whose_files_have_changed(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(READY)
    assert "changed" not in invoke("status").stdout
    gateway.responses["GET", "/fleet/status"] = fleet(READY | {"files_changed": True})
    assert "small: its files have changed; unload and load it to use them" in invoke("status").stdout


def test_nodes_lists_health_devices_memory_and_models(gateway: CannedGateway, invoke: Invoke) -> None:
    found = fleet(READY, LOADING | {"id": "other"})
    gateway.responses["GET", "/fleet/status"] = found
    outcome = invoke("nodes")
    _, row = outcome.stdout.splitlines()
    assert outcome.code == ExitCode.OK
    assert row.split()[:3] == ["beast", "neuron", "up"]
    assert row.endswith("small, other (loading)")
    assert "1 x " in row
    assert " of " in row
    assert json.loads(invoke("nodes", "--json").stdout) == found["nodes"]


def test_nodes_shows_why_a_node_is_down_and_fails(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(READY, up=False, problem="refused")
    outcome = invoke("nodes")
    assert outcome.code == ExitCode.FAILED
    assert "down: refused" in outcome.stdout
    assert "small" not in outcome.stdout, "what it held at the last poll says nothing about now"
    gateway.responses["GET", "/fleet/status"] = fleet() | {"nodes": []}
    assert "no nodes" in invoke("nodes").stdout


def test_ps_lists_models_in_memory(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet({**READY, "pinned": True}, LOADING | {"id": "other"})
    shown = invoke("ps").stdout
    assert "beast keeps 3.0 GiB of KV in RAM" in shown
    for part in ("small", "beast", "ready", "900 MiB", "11 min 40 s", "yes", "loading: read 50%, 4 s left"):
        assert part in shown
    assert [entry["model"]["id"] for entry in json.loads(invoke("ps", "--json").stdout)] == ["small", "other"]


def test_ps_shows_a_group_as_one_model_on_several_nodes(gateway: CannedGateway, invoke: Invoke) -> None:
    nodes = ["beast", "benjy"]
    found = fleet(READY | {"nodes": nodes})
    member = READY | {"nodes": nodes, "rank": 1}
    found["nodes"].append({"name": "benjy", "kind": "neuron", "up": True, "members": [member]})
    gateway.responses["GET", "/fleet/status"] = found
    _, row, *rest = invoke("ps").stdout.splitlines()
    assert row.split()[:6] == ["small", "beast", "+", "benjy", "ready", "1.8"]
    assert not any("small" in line for line in rest)
    found["nodes"][0]["models"] = []
    assert "rank 1 of beast + benjy, ready" in invoke("ps").stdout


def test_ps_shows_no_activity_of_a_node_that_is_down(gateway: CannedGateway, invoke: Invoke) -> None:
    busy = READY | {"in_flight": 7, "load": {"running": 7, "tokens_per_s": 55.0}, "idle_s": 0.0}
    gateway.responses["GET", "/fleet/status"] = fleet(busy)
    assert "55" in invoke("ps").stdout
    gateway.responses["GET", "/fleet/status"] = fleet(busy | {"state": "unreachable"}, up=False)
    _, row, *_ = invoke("ps").stdout.splitlines()
    assert row.split() == ["small", "beast", "(down)", "unreachable", "900", "MiB"]


REQUEST = {
    "id": "req_1",
    "number": 1,
    "time": 1.7e9,
    "key": "anna",
    "model": "small",
    "node": "beast",
    "status": 200,
    "outcome": "complete",
    "ttft_s": 0.25,
    "duration_s": 1.5,
    "tokens_per_s": 42.0,
    "prompt_tokens": 900,
    "cached_tokens": 800,
    "completion_tokens": 30,
    "error": None,
}


def test_logs_shows_requests_oldest_first(gateway: CannedGateway, invoke: Invoke) -> None:
    failed = REQUEST | {"number": 2, "status": 429, "error": "rate_limit_exceeded", "tokens_per_s": None}
    page = {"requests": [failed, REQUEST], "next": 2}
    gateway.responses["GET", "/fleet/activity?model=small&limit=5&after=0"] = page
    shown = invoke("logs", "--model", "small", "-n", "5").stdout.splitlines()
    for part in ("200", "0.25 s", "1.50 s", "42.0", "900 (800) 30", "beast", "anna", "small"):
        assert part in shown[1]
    assert shown[2].endswith("small  rate_limit_exceeded")
    listed = json.loads(invoke("logs", "--model", "small", "-n", "5", "--json").stdout)
    assert [request["number"] for request in listed] == [1, 2]


def test_followed_logs_show_each_request_once_also_after_a_restart(
    gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"requests": [REQUEST], "next": 7}
    gateway.responses["GET", "/fleet/activity?limit=20&after=0"] = first
    gateway.responses["GET", "/fleet/activity?limit=1000&after=7"] = {"requests": [], "next": 0}  # it has restarted
    after_restart = {"requests": [REQUEST | {"model": "later"}], "next": 1}
    gateway.responses["GET", "/fleet/activity?limit=1000&after=0"] = after_restart
    gateway.responses["GET", "/fleet/activity?limit=1000&after=1"] = {"requests": [], "next": 1}
    num_sleeps = iter(range(3))

    def sleep(_seconds: float) -> None:
        if next(num_sleeps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("cortex.cli.commands.logs.time.sleep", sleep)
    outcome = invoke("logs", "-f", "--json")
    assert outcome.code is ExitCode.INTERRUPTED
    assert [json.loads(line)["model"] for line in outcome.stdout.splitlines()] == ["small", "later"]


def test_requests_that_wait_at_their_node_are_not_counted_as_running(gateway: CannedGateway, invoke: Invoke) -> None:
    load = {"running": 1, "waiting": 3, "waiting_by_class": {"default": 2, "priority": 1}}
    gateway.responses["GET", "/fleet/status"] = fleet(READY | {"in_flight": 4, "load": load})
    assert "1 running, 3 waiting (1 priority)" in invoke("status").stdout
    _, row, *_ = (line.split() for line in invoke("ps").stdout.splitlines())
    assert row[row.index("MiB") + 1] == "1"


def test_status_shows_devices_models_and_waiting_requests(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(READY, {**LOADING, "id": "other"}, cold_models=["third"])
    outcome = invoke("status")
    assert outcome.code is ExitCode.OK
    for part in (
        "RTX 5090",
        "24.0 GiB of 32.0 GiB",
        "3.0 GiB of KV in RAM",
        "900 MiB",
        "8,192",
        "idle 11 min",
        "~5.0 GiB",
        "50% read, 4 s",
    ):
        assert part in outcome.stdout
    assert "cold: third" in outcome.stdout
    assert f"2 waiting for large: {WHY}" in outcome.stdout


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 5090", "aarch64 (1 of 2)", "NVIDIA RTX 6000 Ada"])
def test_status_keeps_device_and_memory_on_one_line_at_80_columns(
    gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    device = {"index": 0, "name": name, "total_bytes": 32 << 30, "free_bytes": 1 << 30, "foreign_bytes": 11 << 30}
    gateway.responses["GET", "/fleet/status"] = fleet(READY, devices=[device])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    (line,) = [line for line in invoke("status").stdout.splitlines() if "31.0 GiB of 32.0 GiB" in line]
    assert name.removeprefix("NVIDIA ").removeprefix("GeForce ") in line


def test_status_shows_the_part_that_a_node_has_of_a_model(gateway: CannedGateway, invoke: Invoke) -> None:
    facts = {"devices": [0], "measured_bytes": 3 << 30, "nodes": ["beast", "benjy"], "rank": 1}
    member = {"id": "wide", "state": "ready", "log_lines": ["loading shard 3"], **facts}
    gateway.responses["GET", "/fleet/status"] = fleet(members=[member], cold_models=["other", "wide"])
    shown = invoke("status").stdout
    assert "part of wide, which beast serves: ready, 3.0 GiB" in shown
    assert "loading shard 3" in shown
    assert "cold: other\n" in shown


def test_status_shows_where_files_are_missing(gateway: CannedGateway, invoke: Invoke) -> None:
    absent = {"typo": "typo: there is no complete model at /srv/typo"}
    gateway.responses["GET", "/fleet/status"] = fleet(absent_models=absent)
    assert "  typo: there is no complete model at /srv/typo\n" in invoke("status").stdout


def test_status_shows_why_a_cold_model_is_not_loaded(gateway: CannedGateway, invoke: Invoke) -> None:
    reasons = {"small": "small: broken disk"}
    gateway.responses["GET", "/fleet/status"] = fleet(cold_models=["small"], cold_reasons=reasons)
    assert "  cold: small\n  small: broken disk\n" in invoke("status").stdout


def test_status_shows_why_a_node_is_down_and_exits_with_1(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(up=False, problem="connection refused")
    outcome = invoke("status")
    assert outcome.code is ExitCode.FAILED
    assert "connection refused" in outcome.stdout


def test_status_as_json_is_the_response_of_the_gateway(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(READY)
    assert json.loads(invoke("status", "--json").stdout) == fleet(READY)


def test_explain_keeps_devices_on_one_line_at_80_columns(
    gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"index": 0, "name": "NVIDIA RTX 6000 Ada", "chosen": True, "total_bytes": 48 << 30}
    memory = {"kept_free_bytes": 3 << 30, "have_bytes": 40 << 30, "need_bytes": 5 << 30}
    node = {
        "node": "attic",
        "verdict": "fits_after_eviction",
        "reason": "fits on device 0 after unloading a-model-with-a-long-name, which was unused for 40 minutes",
        "need_bytes": 5 << 30,
        "devices": [{**device, **memory}],
        "occupants": [{"model": "a-model-with-a-long-name", "bytes": 1 << 30, "may_leave": True, "reason": None}],
    }
    gateway.responses["GET", "/fleet/explain/m"] = {"at": 0, "node": "attic", "outcome": "loads", "nodes": [node]}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    (line,) = [line for line in invoke("explain", "m").stdout.splitlines() if "RTX 6000" in line]
    assert all(part in line for part in ("0* NVIDIA RTX 6000 Ada", "48.0 GiB", "3.0 GiB", "40.0 GiB", "5.0 GiB"))


def test_explain_shows_needed_and_available_memory(gateway: CannedGateway, invoke: Invoke) -> None:
    device = {"index": 0, "name": "RTX 3060", "total_bytes": 12 << 30, "have_bytes": 1 << 30, "need_bytes": 5 << 30}
    node = {
        "node": "attic",
        "verdict": "too_small",
        "reason": "every device is too small",
        "need_bytes": 5 << 30,
        "devices": [{**device, "chosen": False, "kept_free_bytes": 3 << 30}],
        "occupants": [{"model": "small", "bytes": 1 << 30, "may_leave": False, "reason": "pinned"}],
    }
    decision = {"model": "large", "at": 0, "node": None, "outcome": "large fits nowhere", "nodes": [node]}
    gateway.responses["GET", "/fleet/explain/large"] = decision
    gateway.responses["GET", "/fleet/decisions?model=large"] = {"decisions": [decision]}
    for arguments in (("explain", "large"), ("explain", "large", "--history")):
        shown = invoke(*arguments).stdout
        for part in (
            "large fits nowhere",
            "attic",
            "0 RTX 3060",
            "5.0 GiB",
            "KEPT FREE",
            "3.0 GiB",
            "too small",
            "small holds 1.0 GiB: pinned",
        ):
            assert part in shown


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        (None, None),
        ({"num_bytes": 3 << 30, "num_tokens": 0}, "keeps 3.0 GiB of its KV cache in host memory\n"),
        (
            {"num_bytes": 3 << 30, "num_tokens": 21_000, "tokens_per_s": 350_000.4},
            "keeps 3.0 GiB of its KV cache (21,000 tokens) in host memory, copied back at 350,000 tokens/s\n",
        ),
    ],
)
def test_explain_shows_the_kv_cache_that_a_node_keeps(
    gateway: CannedGateway, invoke: Invoke, kept: dict[str, float] | None, shown: str | None
) -> None:
    facts = {"node": "attic", "verdict": "fits", "reason": "", "need_bytes": None, "kv_host": kept}
    nothing: list[str] = []
    node = {**facts, "devices": nothing, "occupants": nothing}
    gateway.responses["GET", "/fleet/explain/m"] = {"at": 0, "node": "attic", "outcome": "loads", "nodes": [node]}
    printed = invoke("explain", "m").stdout
    assert shown in printed if shown is not None else "KV cache" not in printed


HOST = {
    "total_bytes": 128 << 30,
    "free_bytes": 60 << 30,
    "budget_bytes": 100 << 30,
    "weight_bytes": 40 << 30,
    "sleeping_bytes": 10 << 30,
    "locked_bytes": 50 << 30,
    "shortage": "the host has 1.0 GiB of memory left",
}


def test_host_memory_is_shown_with_what_it_is_used_for(gateway: CannedGateway, invoke: Invoke) -> None:
    split = {**READY, "host_bytes": 40 << 30}
    gateway.responses["GET", "/fleet/status"] = fleet(split, host=HOST)
    shown = invoke("status").stdout
    assert "50.0 GiB of 100 GiB" in shown
    assert "40.0 GiB weights, 10.0 GiB asleep, 50.0 GiB page-locked" in " ".join(shown.split())
    assert "the host has 1.0 GiB of memory left" in shown
    shown = invoke("ps").stdout
    assert "900 MiB + 40.0 GiB in RAM" in " ".join(shown.split())
    assert "beast: 50.0 GiB of 100 GiB host memory in use: 40.0 GiB weights" in shown


@pytest.mark.parametrize(
    ("node", "row", "code"),
    [
        ({"verdict": "fits", "host": None}, ["attic", "yes", "20.0", "GiB", "32,768"], 0),
        (
            {"verdict": "fits", "host": {"have_bytes": 9 << 30, "need_bytes": 8 << 30, "tokens_per_s": 14.2}},
            ["attic", "yes,", "with", "host", "memory", "20.0", "GiB", "8.0", "GiB", "32,768", "~14.2"],
            0,
        ),
        (
            {"verdict": "fits", "host": {"have_bytes": 9 << 30, "need_bytes": 8 << 30, "tokens_per_s": 247.4}},
            ["attic", "yes,", "with", "host", "memory", "20.0", "GiB", "8.0", "GiB", "32,768", "~247"],
            0,
        ),
        ({"verdict": "too_small", "host": None}, ["attic", "no", "60.0", "GiB"], 7),
    ],
)
def test_fits_says_how_a_model_fits_and_how_fast_it_would_be(
    gateway: CannedGateway, invoke: Invoke, node: dict[str, Any], row: list[str], code: int
) -> None:
    facts = {"node": "attic", "need_bytes": 60 << 30, "takes_bytes": 20 << 30, "context_tokens": 32_768, **node}
    action = "reject" if code else "load"
    gateway.responses["GET", "/fleet/explain/m?origin=operator"] = {"action": action, "outcome": "so", "nodes": [facts]}
    found = invoke("fits", "m")
    assert row in [line.split() for line in found.stdout.splitlines()]
    assert found.code == code


def test_fits_does_not_say_that_a_model_fits_nowhere_while_a_node_sleeps(
    gateway: CannedGateway, invoke: Invoke
) -> None:
    facts = {"node": "attic", "verdict": "standby", "host": None, "need_bytes": 60 << 30, "context_tokens": None}
    decision = {"action": "reject", "outcome": "attic cannot serve m now: asleep.", "nodes": [facts]}
    gateway.responses["GET", "/fleet/explain/m?origin=operator"] = decision
    found = invoke("fits", "m")
    assert ["attic", "node", "asleep", "60.0", "GiB"] in [line.split() for line in found.stdout.splitlines()]
    assert "attic cannot serve m now" in found.stdout
    assert found.code == 0


def test_fits_lists_the_quantisations_of_a_repository_that_is_no_model_yet(
    gateway: CannedGateway, invoke: Invoke
) -> None:
    gateway.responses["GET", "/fleet/explain/org%2Fnew"] = (
        404,
        {"error": {"message": "no model", "code": "model_not_found"}},
    )
    nodes = [{"node": "attic", "verdict": "too_small"}, {"node": "beast", "verdict": "fits_after_eviction"}]
    whole = {"quant": None, "bytes": 90 << 30, "nodes": [{"node": "attic", "verdict": "too_small"}]}
    hosted = [{"node": "attic", "verdict": "too_small", "fits_with_host": True}]
    variants = [
        {"quant": "Q4_K_M", "bytes": 9 << 30, "nodes": nodes},
        {"quant": "Q8_0", "bytes": 45 << 30, "nodes": hosted},
        whole,
    ]
    offer = {"repository": "org/new", "variants": variants}
    gateway.responses["GET", "/fleet/hub/org%2Fnew"] = offer
    found = invoke("fits", "org/new")
    assert [line.split() for line in found.stdout.splitlines()][1:] == [
        ["Q4_K_M", "9.0", "GiB", "beast", "(after", "eviction)"],
        ["Q8_0", "45.0", "GiB", "attic", "(a", "mixture", "only,", "with", "host", "memory)"],
        ["safetensors", "90.0", "GiB", "no", "node"],
    ]
    for name, rows in (("q4", ["Q4_K_M"]), ("bf16", ["safetensors"]), ("Q5_K_M", [])):
        path = f"org%2Fnew%3A{name}"
        gateway.responses["GET", f"/fleet/explain/{path}"] = gateway.responses["GET", "/fleet/explain/org%2Fnew"]
        gateway.responses["GET", f"/fleet/hub/{path}"] = offer
        found = invoke("fits", f"org/new:{name}")
        assert [line.split()[0] for line in found.stdout.splitlines()][1:] == rows
    assert (found.code, "name one that it has: Q4_K_M, Q8_0, safetensors" in found.error) == (5, True)
    gateway.responses["GET", "/fleet/hub/org%2Fnew"] = {"repository": "org/new", "variants": [whole]}
    assert invoke("fits", "org/new").code == 7
    gateway.responses["GET", "/fleet/hub/org%2Fnew"] = 403, {"error": {"message": "operators only", "code": "y"}}
    found = invoke("fits", "org/new")
    assert (found.code, found.error.partition(";")[0]) == (5, "no model")
