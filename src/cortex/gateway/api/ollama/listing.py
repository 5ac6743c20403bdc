"""The models of the fleet as Ollama's listings describe them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.placement.eviction import ttl_left_s
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.api.models import MayUse, offered, offered_aliases
from cortex.wire.dialects.ollama.models import OllamaModel, from_status
from cortex.wire.node.protocol import Capabilities, ModelState


def listed(fleet: Fleet, created: float, now: float, may_use: MayUse) -> list[OllamaModel]:
    """The models and aliases that the client may use, in alphabetical order. `now`: on the clock of the fleet."""
    return sorted(_found(fleet, created, now, may_use), key=lambda model: model.name.lower())


def _found(fleet: Fleet, created: float, now: float, may_use: MayUse) -> Iterator[OllamaModel]:
    for spec in offered(fleet):
        if may_use(spec.id):
            yield described(fleet, spec, created, now)
    for name, model in offered_aliases(fleet):
        if may_use(model):
            yield described(fleet, fleet.catalogue.spec(model), created, now, name)


def files_of(fleet: Fleet, spec: ModelSpec) -> str:
    """The name under which nodes list the files of a model. One that was made of another model, and never loaded, has
    those of its source."""
    return spec.id if spec.source is None or fleet.listing(spec.id) else spec.source


def described(fleet: Fleet, spec: ModelSpec, created: float, now: float, name: str | None = None) -> OllamaModel:
    """One model under `name`: as a node that has it ready reports it, else as any node does, else as the catalogue
    says."""
    name = name or spec.id
    places = [(node, node.residencies[spec.id]) for node in fleet.nodes if spec.id in node.residencies]
    held = [residency for _, residency in places]
    ready = [residency for residency in held if residency.state is ModelState.READY]
    on_gpus = (each for node, each in places if each in ready and not _is_cpu(node))
    capabilities = _capabilities(spec)
    best = next(iter(ready or held), None) or _source_of(fleet, spec)
    if best is None:
        return OllamaModel(
            name,
            created,
            quant=spec.quant,
            context_tokens=spec.context_tokens,
            capabilities=capabilities or Capabilities(),
        )
    read = (each.status.content_digest for each in (*ready, *held, best))
    return from_status(
        best.status,
        created,
        name=name,
        device_bytes=sum(map(_bytes, ready)),
        vram_bytes=sum(map(_bytes, on_gpus)),
        capabilities=capabilities,
        context_tokens=spec.context_tokens,
        files_digest=next(filter(None, read), None),
        expires_at=_expires_at(fleet, [place for place in places if place[1] in ready], now),
    )


def _source_of(fleet: Fleet, spec: ModelSpec) -> Residency | None:
    """The model that `spec` was made of, as if it were not in memory, with the context of `spec`."""
    source = files_of(fleet, spec)
    held = next((node.residencies[source] for node in fleet.listing(source)), None)
    if held is None:
        return None
    tokens = spec.context_tokens or held.status.full_context_tokens or held.status.context_tokens
    cold = msgspec.structs.replace(held.status, state=ModelState.COLD, measured_bytes=None, context_tokens=tokens)
    return msgspec.structs.replace(held, status=cold)


def _expires_at(fleet: Fleet, ready: list[tuple[Node, Residency]], now: float) -> float | None:
    """Unix time at which the last replica is unloaded if no request comes; None without such a time."""
    left = [ttl_left_s(held, node, fleet, now) for node, held in ready]
    known = [left_s for left_s in left if left_s is not None]
    return time.time() + max(0.0, *known) if known and len(known) == len(left) else None


def _capabilities(spec: ModelSpec) -> Capabilities | None:
    """From the catalogue; None if it has none."""
    if not spec.capabilities:
        return None
    has = frozenset(spec.capabilities)
    return Capabilities(
        chat="chat" in has,
        tools="tools" in has,
        reasoning="reasoning" in has,
        vision="vision" in has,
        embeddings="embeddings" in has,
        insert="insert" in has,
    )


def _is_cpu(node: Node) -> bool:
    return any(device.kind == "cpu" for device in node.devices)


def _bytes(residency: Residency) -> int:
    return residency.num_bytes or 0
