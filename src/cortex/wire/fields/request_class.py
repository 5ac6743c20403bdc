"""Classes of requests, which decide their order.

A client asks for one with `service_tier`, or with vLLM's `priority`, where a lower number is served earlier. Its key
has a default and may have a highest class. A gateway tells nodes the class in a header of its own.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, get_args

from cortex.wire.fields.body import Fields

RequestClass = Literal["idle", "flex", "default", "priority"]
CLASSES: tuple[RequestClass, ...] = get_args(RequestClass)
"""In ascending order. `idle` is work for which no one waits."""
TIER, PRIORITY = CLASS_FIELDS = "service_tier", "priority"
_TIERS: dict[str, RequestClass | None] = {
    "auto": None,
    "default": "default",
    "flex": "flex",
    "priority": "priority",
    "fast": "priority",  # as in OpenAI's API, whose responses have `priority`
    "scale": "default",
    "standard_only": "default",
}
"""The class for each `service_tier`; None for that of the key."""
_LARGEST = 2**63


def level_of(name: RequestClass) -> int:
    """Its level in the order."""
    return CLASSES.index(name)


def lower(one: RequestClass, other: RequestClass | None) -> RequestClass:
    """The lower of two classes; None is no bound."""
    return one if other is None or level_of(one) <= level_of(other) else other


def asked_class(fields: Fields, known: Container[str]) -> RequestClass | None:
    """The class that a body names, the lower one if both fields do; None for that of the key. `known`: the envelope of
    its dialect. Raises InvalidValue."""
    tier = fields.text(TIER) if TIER in known else None
    if tier is not None and tier not in _TIERS:
        raise fields.invalid(TIER, "use 'auto', 'default', 'flex' or 'priority'")
    asked = None if tier is None else _TIERS[tier]
    number = fields.integer(PRIORITY, low=-_LARGEST, high=_LARGEST) if PRIORITY in known else None
    if not number:
        return asked
    by_number: RequestClass = "priority" if number < 0 else "flex"
    return lower(by_number, asked)


def served_class(
    asked: RequestClass | None, default: RequestClass | None = None, highest: RequestClass | None = None
) -> RequestClass:
    """The class of a request. `default`, `highest`: those of its key."""
    served = asked or default or "default"
    return served if highest is None else lower(served, highest)


def tier_of(name: RequestClass) -> str:
    """The `service_tier` in an OpenAI response for this class."""
    return "flex" if name == "idle" else name


def anthropic_tier_of(name: RequestClass) -> str:
    """The same in `usage` of an Anthropic message."""
    return {"priority": "priority", "default": "standard"}.get(name, "batch")
