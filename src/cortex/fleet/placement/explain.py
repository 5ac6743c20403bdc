"""A decision for people: table rows, JSON, text, and the error for a client. One wording everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cortex.formats.units import gib
from cortex.wire.errors import (
    CortexError,
    Draining,
    InsufficientCapacity,
    LoadFailed,
    ModelNotFound,
    ModelUnsupported,
    Overloaded,
    UpstreamUnavailable,
)
from cortex.wire.node.host_splits import speed_in_words
from cortex.wire.words import plural

from .decision import Assessment, Decision, Verdict

DRAINING_RETRY_S = 30.0
"""Retry delay for a model whose nodes are drained, by an operator or for a restart."""
HEADER = ("node", "device", "total", "have", "need", "verdict", "why")


def rows(decision: Decision) -> tuple[tuple[str, ...], ...]:
    """One row per node and device, under `HEADER`; verdict and reason are in a node's first row."""
    return tuple(row for assessment in decision.assessments for row in _rows(assessment))


def text(decision: Decision) -> str:
    """A plain table, then the outcome in one line."""
    table = (HEADER, *rows(decision))
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*lines, outcome(decision)])


def outcome(decision: Decision) -> str:
    """The decision in one sentence."""
    model_id, node = decision.model_id, decision.node
    match decision.action:
        case "route":
            return f"{model_id} is ready on {_nodes(decision, Verdict.RESIDENT)}."
        case "join":
            return f"{model_id} is starting on {_nodes(decision, Verdict.STARTING)}."
        case "wake" | "load":
            verb = "wake" if decision.action == "wake" else "load"
            names = [f"{model} on {place}" if place != node else model for place, model in decision.evictions]
            victims = f" after unloading {', '.join(names)}" if names else ""
            devices = f" (device {', '.join(map(str, decision.devices))})" if decision.devices else ""
            parts = "".join(f" and {part.node}" for part in decision.parts)
            return f"{verb} {model_id} on {node}{devices}{parts}{victims}.{_takes(decision)}"
        case "wait":
            first = decision.assessments[0]
            return f"{model_id} waits for room on {first.node}: {first.reason}."
        case "reject":
            return rejection(decision).message


def _takes(decision: Decision) -> str:
    """The memory and context of the load, if the node has reported the sizes of contexts."""
    chosen = decision.chosen
    if chosen is None or chosen.context_tokens is None or chosen.full_context_tokens is None or chosen.asleep:
        return ""
    takes_bytes = sum(place.takes_bytes or 0 for place in (chosen, *chosen.parts))
    if chosen.split is not None:
        tokens = f"{chosen.context_tokens:,} of {chosen.full_context_tokens:,} tokens"
        speed = speed_in_words(chosen.split.tokens_per_s, is_measured=chosen.is_split_measured)
        return (
            f" It takes {gib(takes_bytes)} of the device and {gib(chosen.split.host_bytes)} of host memory, {speed}, "
            f"with a context of {'only ' * chosen.is_short}about {tokens}."
        )
    if chosen.context_tokens >= chosen.full_context_tokens:
        return f" It takes {gib(takes_bytes)}, with its context of {chosen.full_context_tokens:,} tokens."
    tokens = f"{chosen.context_tokens:,} of {chosen.full_context_tokens:,} tokens"
    return f" It takes {gib(takes_bytes)}, with a context of {'only ' * chosen.is_short}about {tokens}."


def _nodes(decision: Decision, verdict: Verdict) -> str:
    """All nodes with this verdict, the best one first."""
    return ", ".join(each.node for each in decision.assessments if each.verdict is verdict)


def as_json(decision: Decision) -> dict[str, Any]:
    """The decision as plain data, for `/fleet/decisions` and the details of an error."""
    return {
        "model": decision.model_id,
        "at": decision.at,
        "origin": decision.origin,
        "action": decision.action,
        "node": decision.node,
        "devices": list(decision.devices),
        "victims": list(dict.fromkeys(eviction.model for eviction in decision.evictions)),
        "outcome": outcome(decision),
        "nodes": [_assessment_json(assessment) for assessment in decision.assessments],
        "nodes_omitted": decision.num_omitted,
    }


def rejection(decision: Decision) -> CortexError:
    """The error for a request whose decision is `reject`, or `wait` for an operator's order."""
    error = _ERRORS.get(_decisive(decision), InsufficientCapacity)
    if any(assessment.waits_for_foreground for assessment in decision.assessments):
        error = Overloaded
    details = {"nodes": [_assessment_json(assessment) for assessment in decision.assessments]}
    retry_after_s = DRAINING_RETRY_S if error is Draining else None
    return error(_rejection_message(decision, error), retry_after_s=retry_after_s, details=details)


_ERRORS: dict[Verdict | None, type[CortexError]] = {
    None: UpstreamUnavailable,
    Verdict.BLOCKED: Overloaded,
    Verdict.CROWDED: Overloaded,
    Verdict.DRAINING: Draining,
    Verdict.STANDBY: UpstreamUnavailable,
    Verdict.UNHEALTHY: UpstreamUnavailable,
    Verdict.FAILED: LoadFailed,
    Verdict.UNSUPPORTED: ModelUnsupported,
    Verdict.MANUAL: UpstreamUnavailable,
    Verdict.EXCLUDED: UpstreamUnavailable,
    Verdict.NOT_LISTED: ModelNotFound,
}


def _decisive(decision: Decision) -> Verdict | None:
    """The verdict that selects the error: the best one, since assessments come best first."""
    return decision.assessments[0].verdict if decision.assessments else None


def _rejection_message(decision: Decision, error: type[CortexError]) -> str:
    if not decision.assessments:
        return f"{decision.model_id} cannot run: the fleet has no nodes; add one under [[neurons]]."
    model = decision.model_id
    if error is Overloaded and all(each.waits_for_itself for each in decision.assessments):
        where = "; ".join(f"{each.node} cannot load {model} now: {each.reason}" for each in decision.assessments)
        return f"{where}. Try again when it is unloaded."
    if len(decision.assessments) == 1:  # of the node that the operator named, or of the only one
        (alone,) = decision.assessments
        lead = {
            Overloaded: f"{alone.node} has no room for {model} now",
            LoadFailed: f"{model} could not be loaded on {alone.node}",
            ModelUnsupported: f"{alone.node} does not support {model}",
            Draining: f"{alone.node} cannot serve {model} now",
            UpstreamUnavailable: f"{alone.node} cannot serve {model} now",
            ModelNotFound: f"{alone.node} does not have {model}",
        }.get(error, f"{model} does not fit on {alone.node}")
        return f"{lead}: {_why(alone)}."
    reasons = [f"{assessment.node}: {_why(assessment)}" for assessment in decision.assessments]
    others = [f"{plural(decision.num_omitted, 'other node')} no better"] if decision.num_omitted else []
    per_node = "; ".join(reasons + others)
    if _decisive(decision) is Verdict.CANNOT_SPAN:
        return f"no node can run {model} over the devices that it asks for. {per_node}."
    lead = {
        Overloaded: f"there is no room for {model} now",
        LoadFailed: f"{model} could not be loaded",
        ModelUnsupported: f"no node supports {model}",
        Draining: f"no node can serve {model} now",
        UpstreamUnavailable: f"no node can serve {model} now",
        ModelNotFound: f"no node has {model}",
    }.get(error, f"{model} fits nowhere in the fleet")
    return f"{lead}. {per_node}."


def _why(assessment: Assessment) -> str:
    """The reason. If memory decides and the reason lacks them, the needed and available bytes are added."""
    is_memory = assessment.verdict in (Verdict.BLOCKED, Verdict.CROWDED, Verdict.HELD)
    if not is_memory or assessment.waits_for_itself:
        return assessment.reason
    deciding = next(
        (part for part in assessment.parts if f"{part.node}: {part.reason}" == assessment.reason), assessment
    )
    if not deciding.rows:
        return assessment.reason
    have = max(row.available_bytes for row in deciding.rows)
    return f"{assessment.reason} (need {gib(deciding.rows[0].need_bytes)}, have {gib(have)})"


def _rows(assessment: Assessment) -> Iterator[tuple[str, ...]]:
    if not assessment.rows:
        yield (assessment.node, "", "", "", gib(assessment.need_bytes), assessment.verdict.value, assessment.reason)
    for number, row in enumerate(assessment.rows):
        verdict, reason = (assessment.verdict.value, assessment.reason) if number == 0 else ("", "")
        mark = "*" if row.chosen else ""
        yield (
            assessment.node if number == 0 else "",
            f"{row.index}{mark} {row.name}",
            gib(row.total_bytes),
            gib(row.available_bytes),
            gib(row.need_bytes),
            verdict,
            reason,
        )
    if assessment.rows and assessment.host_left_bytes is not None:
        need_bytes = None if assessment.split is None else assessment.split.host_bytes
        yield ("", "host memory", "", gib(assessment.host_left_bytes), gib(need_bytes), "", "")


def _host_json(assessment: Assessment) -> dict[str, Any] | None:
    """Host memory, if part of the weights is or could be there."""
    if assessment.host_left_bytes is None:
        return None
    split = assessment.split
    return {
        "have_bytes": assessment.host_left_bytes,
        "need_bytes": None if split is None else split.host_bytes,
        "tokens_per_s": None if split is None or not split.tokens_per_s else split.tokens_per_s,
        "is_measured": assessment.is_split_measured,
    }


def _assessment_json(assessment: Assessment) -> dict[str, Any]:
    return {
        "node": assessment.node,
        "verdict": assessment.verdict.value,
        "reason": assessment.reason,
        "pinned": assessment.pinned,
        "need_bytes": assessment.need_bytes,
        "takes_bytes": assessment.takes_bytes,
        "context_tokens": assessment.context_tokens,
        "full_context_tokens": assessment.full_context_tokens,
        "context_is_short": assessment.is_short,
        "ceiling_bytes": assessment.ceiling_bytes,
        "bench": msgspec.to_builtins(assessment.bench),
        "host": _host_json(assessment),
        "kv_host": msgspec.to_builtins(assessment.kv_host),
        "victims": [victim.model_id for victim in assessment.victims],
        "parts": [
            {
                "node": part.node,
                "verdict": part.verdict.value,
                "reason": part.reason,
                "takes_bytes": part.takes_bytes,
                "devices": list(part.devices),
                "victims": [victim.model_id for victim in part.victims],
            }
            for part in assessment.parts
        ],
        "devices": [
            {
                "index": row.index,
                "name": row.name,
                "total_bytes": row.total_bytes,
                "other_programs_bytes": row.foreign_bytes,
                "kept_free_bytes": row.kept_free_bytes,
                "ceiling_bytes": row.ceiling_bytes,
                "have_bytes": row.available_bytes,
                "need_bytes": row.need_bytes,
                "chosen": row.chosen,
            }
            for row in assessment.rows
        ],
        "occupants": [
            {
                "model": occupant.model_id,
                "bytes": occupant.num_bytes,
                "host_bytes": occupant.host_bytes,
                "may_leave": occupant.protection is None,
                "reason": occupant.reason,
            }
            for occupant in assessment.occupants
        ],
    }
