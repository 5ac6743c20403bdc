"""Responses of a gateway, for the canned one."""

from __future__ import annotations

import json
from typing import Any

MODELS = {
    "data": [
        {
            "id": "small",
            "loaded": True,
            "locations": [{"node": "beast", "status": "ready", "vram_mb": 900, "replica_devices": [[0], [1]]}],
            "feasible_on": ["beast"],
            "limit": {"context": 8192},
            "capabilities": {"chat": True, "tools": False},
        },
        {"id": "fast", "alias_of": "small", "loaded": True, "locations": [{"node": "beast", "status": "ready"}]},
        {"id": "large", "loaded": False, "locations": [], "feasible_on": ["beast", "attic"]},
        {"id": "huge", "loaded": False, "locations": [], "feasible_on": []},
    ]
}


def sse(*events: Any) -> bytes:
    lines = [b": keepalive\n\n", *(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)]
    return b"".join([*lines, b"data: [DONE]\n\n"])


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


WHY = "large fits on beast once small is idle."


def fleet(*models: dict[str, Any], **node: Any) -> dict[str, Any]:
    device = {"index": 0, "kind": "cuda", "name": "RTX 5090", "total_bytes": 32 << 30, "free_bytes": 8 << 30}
    device["kv_host_bytes"] = 3 << 30
    beast = {"name": "beast", "kind": "neuron", "up": True, "devices": [device], "models": list(models), **node}
    return {"version": "0", "nodes": [beast], "waiting": {"large": 2}, "waiting_reasons": {"large": WHY}}


READY = {"id": "small", "state": "ready", "measured_bytes": 900 << 20, "context_tokens": 8192, "idle_s": 700}
FAILED = {"id": "small", "state": "failed", "reason": "small: the file is truncated."}
LOADING = {
    "id": "small",
    "state": "loading",
    "estimate_bytes": 5 << 30,
    "progress": {"stage": "read", "done_bytes": 50, "total_bytes": 100, "eta_s": 4.0},
}


def job(state: str = "done", **fields: Any) -> dict[str, Any]:
    return {"id": "job_1", "kind": "load", "model": "small", "nodes": ["beast"], "state": state} | fields
