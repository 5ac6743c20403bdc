"""Which loaded model is loaded again, because a request asks for a longer context than it has. Pure."""

from __future__ import annotations

import msgspec

from cortex.fleet.holdings import bytes_held
from cortex.fleet.memory import need_of
from cortex.fleet.topology import Fleet, ModelOnNode, Node, Residency
from cortex.wire.node.contexts import tolerated
from cortex.wire.node.protocol import ModelState

from .decision import Verdict
from .place import assess


def to_load_again(model_id: str, tokens: int, fleet: Fleet, now: float) -> ModelOnNode | None:
    """The idle replica that would get a context of `tokens` by another load, evicting idle models. None: one has it,
    requests run or would be lost, or there is no memory for it. A model of several nodes stays as it is."""
    spec = fleet.catalogue.spec(model_id)
    for node in fleet.listing(model_id):
        held = node.residencies[model_id]
        if held.state is ModelState.READY and (held.status.context_tokens or tokens) >= tokens:
            return None
    for node in fleet.listing(model_id):
        held = node.residencies[model_id]
        is_kept = held.pinned or spec.is_pinned_on(node.name) or held.is_busy or held.closed
        is_movable = held.state is ModelState.READY and not is_kept
        if not (is_movable and node.healthy and node.takes_orders and not node.draining) or held.status.nodes:
            continue
        emptied = _without(node, held)
        need = need_of(spec, emptied, fleet)
        if need is None or need.contexts is None or need.contexts.full_tokens <= (held.status.context_tokens or 0):
            continue
        found = assess(spec, emptied, fleet.with_node(emptied), now, origin="request")
        is_start = found.verdict in (Verdict.FITS, Verdict.FITS_AFTER_EVICTION)
        if is_start and (found.context_tokens or 0) >= tolerated(min(tokens, need.contexts.full_tokens)):
            return ModelOnNode(node.name, model_id)
    return None


def _without(node: Node, held: Residency) -> Node:
    """The node once the model is unloaded."""
    devices = [
        msgspec.structs.replace(
            device, free_bytes=device.free_bytes + bytes_held(device.index, device.kind, held.status)
        )
        for device in node.devices
    ]
    cold = msgspec.structs.replace(
        held, status=msgspec.structs.replace(held.status, state=ModelState.COLD, measured_bytes=None)
    )
    return msgspec.structs.replace(node, devices=tuple(devices), residencies={**node.residencies, held.model_id: cold})
