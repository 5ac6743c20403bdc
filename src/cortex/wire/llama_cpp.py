"""The bodies of llama.cpp's own routes: the list of models with their states, and the properties of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from cortex import __version__
from cortex.wire.node.protocol import ModelState, ModelStatus
from cortex.wire.sse import frame

_STATES = {
    ModelState.READY: "loaded",
    ModelState.LOADING: "loading",
    ModelState.RECOVERING: "loading",
    ModelState.DOWNLOADING: "downloading",
    ModelState.ASLEEP: "sleeping",
    ModelState.UNLOADING: "loaded",
}
"""Other states are `unloaded`."""
_ORDER = ("loaded", "loading", "downloading", "sleeping", "unloaded")


def entry(id: str, held: Iterable[ModelStatus], created: int) -> dict[str, Any]:
    """One model of `/models`: with the best of its states, where several nodes have it."""
    found = list(held)
    values = [_STATES.get(each.state, "unloaded") for each in found]
    status: dict[str, Any] = {"value": min(values, key=_ORDER.index, default="unloaded")}
    if status["value"] == "unloaded" and any(each.state is ModelState.FAILED for each in found):
        status |= {"failed": True, "exit_code": 1}
    inputs = ["text", "image"] if any(each.capabilities.vision for each in found) else ["text"]
    architecture = {"input_modalities": inputs, "output_modalities": ["text"]}
    facts = {"id": id, "object": "model", "owned_by": "cortex", "created": created}
    return {**facts, "status": status, "architecture": architecture}


def model_list(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(entries)}


def router_props() -> dict[str, Any]:
    """`/props` without a model: what the server is."""
    return {"role": "router", "models_autoload": True, "build_info": f"cortex {__version__}"}


def status_event(model: str, status: str, *, is_failed: bool = False) -> bytes:
    """An event of `/models/sse`."""
    data: dict[str, Any] = {"status": status}
    if status == "unloaded":
        data["exit_code"] = 1 if is_failed else 0
    return frame(msgspec.json.encode({"model": model, "event": "status_change", "data": data}))


def props(status: ModelStatus, name: str | None = None, *, template: str = "") -> dict[str, Any]:
    """`/props` of a model: what clients read of it. A model has no slots here, so there is one."""
    sampling = {field: getattr(status.sampling, field) for field in status.sampling.__struct_fields__}
    return {
        "default_generation_settings": {
            "id": 0,
            "id_task": -1,
            "n_ctx": status.context_tokens or 0,
            "speculative": False,
            "is_processing": False,
            "params": {field: value for field, value in sampling.items() if value is not None},
        },
        "total_slots": 1,
        "model_alias": name or status.id,
        "model_path": status.id,
        "chat_template": template,
        "chat_template_caps": {},
        "modalities": {"vision": status.capabilities.vision, "audio": False},
        "build_info": f"cortex {__version__}",
        "is_sleeping": status.state is ModelState.ASLEEP,
    }
