"""`/v1/models`: every model of the fleet, in a form that both OpenAI and Anthropic clients read.

Pure: takes a fleet, returns plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from cortex.fleet.catalogue import MEBIBYTE, ModelSpec, is_pattern
from cortex.fleet.memory import contexts_of, estimated_bytes, sized_for
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.model_names import is_uploaded
from cortex.wire.node.protocol import Capabilities, ModelState, ModelStatus

FeasibleOn = Callable[[str], tuple[str, ...]]
"""The nodes that could serve the model with this id, now or after making room."""

MayUse = Callable[[str], bool]
"""Whether the client may use the model with this id."""

_ABSENT = (ModelState.COLD, ModelState.FAILED, ModelState.ASLEEP)


def listing(
    fleet: Fleet,
    feasible_on: FeasibleOn,
    created: int,
    may_use: MayUse,
    *,
    for_operator: bool = True,
    with_unlisted: bool = False,
) -> list[dict[str, Any]]:
    """The models that the client may use, sorted by name."""
    data = [
        entry(fleet, spec, feasible_on, created, for_operator=for_operator)
        for spec in offered(fleet, with_unlisted=with_unlisted)
        if may_use(spec.id)
    ]
    data += [
        _alias_entry(fleet, name, model, feasible_on, created, for_operator=for_operator)
        for name, model in offered_aliases(fleet, with_unlisted=with_unlisted)
        if may_use(model)
    ]
    data.sort(key=lambda item: str(item["id"]).lower())
    return data


def offered(fleet: Fleet, *, with_unlisted: bool = False) -> list[ModelSpec]:
    """The catalogue's models and those that only nodes list. Uploaded files are listed as the models made of them."""
    catalogued = {spec.id for spec in fleet.catalogue.models}
    catalogued |= {spec.source or "" for spec in fleet.catalogue.models if is_uploaded(spec.source)}
    listed = (spec for spec in fleet.catalogue.models if with_unlisted or not spec.unlisted)
    return [*listed, *(ModelSpec(id=model) for model in sorted(fleet.live_models() - catalogued))]


def offered_aliases(fleet: Fleet, *, with_unlisted: bool = False) -> Iterator[tuple[str, str]]:
    """The aliases of these models that are names, and the model of each."""
    for name, target in fleet.catalogue.aliases.items():
        model = target if isinstance(target, str) else target.model
        if not is_pattern(name) and (with_unlisted or not fleet.catalogue.spec(model).unlisted):
            yield name, model


def entry(
    fleet: Fleet, spec: ModelSpec, feasible_on: FeasibleOn, created: int, *, for_operator: bool = True
) -> dict[str, Any]:
    """One model. `problems`: why nodes lack its files; `failures`: why it is not loaded, after a failed load or a
    fault. Both name files and are for operators."""
    listing = [(node, node.residencies[spec.id]) for node in fleet.listing(spec.id)]
    held = [(node, residency) for node, residency in listing if not residency.is_absent]
    problems = {node.name: residency.status.reason for node, residency in listing if residency.is_absent}
    failures = {node.name: residency.failure for node, residency in held if residency.failure is not None}
    reasons = {name: found for name, found in (("problems", problems), ("failures", failures)) if found}
    about: dict[str, Any] = {"name": spec.display_name, "description": spec.description, "metadata": spec.metadata}
    about |= {"meta": {"llamaswap": spec.metadata} if spec.metadata else None}  # where llama-swap's clients look
    context, input, output = _limits(spec, held)
    cut = _cut_context(spec, held, context)
    return {
        "id": spec.id,
        "object": "model",
        "type": "model",
        "display_name": spec.display_name or spec.id,
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "cortex",
        "loaded": next(fleet.replicas(spec.id), None) is not None,
        "feasible_on": list(feasible_on(spec.id)),
        "backend": next((each.status.backend for _, each in held if each.status.backend is not None), None),
        "sizes": _sizes(spec, held),
        "locations": [
            _location(node, residency, for_operator)
            for node, residency in held
            if residency.state is not ModelState.COLD
        ],
        "max_model_len": context,
        "limit": {"context": context, "input": input, "output": output} | cut,
        "capabilities": _capabilities(spec, held),
        "sampling": _sampling(spec, held),
        "cost": msgspec.to_builtins(spec.cost),
        **{name: value for name, value in about.items() if value},
    } | (reasons if for_operator else {})


def _sizes(spec: ModelSpec, held: list[tuple[Node, Residency]]) -> list[dict[str, Any]]:
    """The memory that the model takes in each quantisation that a node has, the format of most of its weights (None:
    unknown), and those nodes. Dense weights to be quantised at load count as quantised."""
    sizes: dict[tuple[str | None, str | None, int | None], list[str]] = {}
    for node, residency in held:
        status = sized_for(spec, residency.status)
        form: tuple[str | None, str | None, int | None] = (spec.quant, None, None)
        if status is not None:
            num_bytes = estimated_bytes(spec, status) if status.measured_bytes is None else status.measured_bytes
            form = (status.quant, status.stored.dtype if status.stored is not None else None, num_bytes)
        sizes.setdefault(form, []).append(node.name)
    return [
        {"quant": quant, "dtype": dtype, "bytes": num_bytes, "nodes": nodes}
        for (quant, dtype, num_bytes), nodes in sizes.items()
    ]


def _alias_entry(
    fleet: Fleet, name: str, model: str, feasible_on: FeasibleOn, created: int, *, for_operator: bool
) -> dict[str, Any]:
    described = entry(fleet, fleet.catalogue.spec(model), feasible_on, created, for_operator=for_operator)
    alias = fleet.catalogue.aliases[name]
    own = {} if isinstance(alias, str) else {"name": alias.display_name, "description": alias.description}
    own = {key: text for key, text in own.items() if text}
    shown = own.get("name") or f"{name} → {model}"
    return described | own | {"id": name, "display_name": shown, "alias_of": model}


def _location(node: Node, residency: Residency, for_operator: bool) -> dict[str, Any]:
    status = residency.status
    place: dict[str, Any] = {
        "node": node.name,
        "status": str(node.shown_state(residency)),
        "vram_mb": 0 if status.state in _ABSENT else (residency.num_bytes or 0) // MEBIBYTE,
    }
    if status.nodes:
        place["nodes"] = list(status.nodes)
    if status.state is ModelState.READY and status.replica_devices:
        place["replica_devices"] = [list(devices) for devices in status.replica_devices]
    if status.state is ModelState.READY and (status.context_tokens or 0) < (status.full_context_tokens or 0):
        place |= {"context": status.context_tokens, "full_context": status.full_context_tokens}
    if status.host_bytes:
        place["host_mb"] = status.host_bytes // MEBIBYTE
    if status.progress is not None:
        progress = status.progress if for_operator else msgspec.structs.replace(status.progress, waits_for=None)
        place["progress"] = msgspec.to_builtins(progress)
    if status.reason is not None and for_operator:
        place["reason"] = status.reason
    return place


def _limits(spec: ModelSpec, held: list[tuple[Node, Residency]]) -> tuple[int | None, int | None, int | None]:
    """The limits of context, prompt and response at the ready replica with the largest context, which gets the prompts
    that are too long for others. If none is ready, those expected on the node with the most memory for it, at most
    those of its entry."""
    ready = [residency.status for _, residency in held if residency.state is ModelState.READY]
    statuses = ready or [_as_loaded(spec, each.status) for _, each in held]
    largest = max(statuses, key=lambda status: status.context_tokens or 0, default=None)
    if largest is None:
        return (spec.context_tokens,) * 3
    named = None if ready else spec.context_tokens
    context = _smallest(largest.context_tokens, named) or spec.context_tokens
    most_input, most_output = largest.max_input_tokens, largest.max_output_tokens
    return context, _smallest(most_input, named) or context, _smallest(most_output, named) or context


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _as_loaded(spec: ModelSpec, status: ModelStatus) -> ModelStatus:
    """The limits after a load with the context of the catalogue, which replaces that of the node's configuration."""
    contexts = contexts_of(spec, status)
    if contexts is None or not contexts.empty_tokens or status.state is ModelState.ASLEEP:  # it wakes as it is
        return status
    tokens = min(contexts.full_tokens, contexts.empty_tokens)
    is_prompt_limited = (status.max_input_tokens or 0) < (status.context_tokens or 0)
    most_input = min(status.max_input_tokens or tokens, tokens) if is_prompt_limited else tokens
    return msgspec.structs.replace(status, context_tokens=tokens, max_input_tokens=most_input, max_output_tokens=tokens)


def _cut_context(spec: ModelSpec, held: list[tuple[Node, Residency]], context: int | None) -> dict[str, int]:
    """The context that the model would have if memory did not limit it where it is ready, if that is more."""
    ready = [residency.status for _, residency in held if residency.state is ModelState.READY]
    full_tokens = [min(filter(None, (each.full_context_tokens, spec.context_tokens)), default=0) for each in ready]
    full = max(full_tokens, default=0)
    return {"full_context": full} if context is not None and context < full else {}


def _sampling(spec: ModelSpec, held: list[tuple[Node, Residency]]) -> dict[str, float]:
    """The sampling defaults that a ready replica reports; if none is ready, those after a load."""
    ready = next((residency.status for _, residency in held if residency.state is ModelState.READY), None)
    reported = ready or (held[0][1].status if held else None)
    found = {} if reported is None else msgspec.structs.asdict(reported.sampling)
    if ready is None:
        found |= spec.sampling.given
    return {name: value for name, value in found.items() if value is not None}


def _capabilities(spec: ModelSpec, held: list[tuple[Node, Residency]]) -> dict[str, bool]:
    names = [field.name for field in msgspec.structs.fields(Capabilities) if field.name != "notes"]
    if spec.capabilities:
        return {name: name in spec.capabilities for name in names}
    reported = held[0][1].status.capabilities if held else Capabilities()
    reads_pictures = any(each.status.capabilities.vision for _, each in held)  # a node may leave the tower out
    return {name: getattr(reported, name) for name in names} | {"vision": reads_pictures}
