"""`cortex models`: the models that clients can use."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command
from cortex.cli.output import console, json_option, print_json, size, state, table
from cortex.wire.words import replicas_in_words


@click.command(cls=Command)
@gateway_options
@json_option
def models(gateway: GatewayClient, as_json: bool) -> None:
    """List the models that clients can use.

    Shows models and aliases with state, nodes (in parentheses: where it fits) and replicas there, memory and
    quantisation, backend (native, or the library that runs it), context length and capabilities.
    """
    listed = gateway.get("/v1/models?unlisted=true")["data"]
    if as_json:
        print_json(listed)
        return
    if not listed:
        console().print("no models yet: start one with `cortex up MODEL`, or list some in models.toml")
        return
    rows = table("MODEL", "STATE", "WHERE", ">MEMORY", "QUANT", "BACKEND", ">CONTEXT", "CAN")
    for entry in listed:
        memory, quants = _sizes(entry)
        places, context = _places(entry), _context(entry)
        backend = str(entry.get("backend") or "")
        rows.add_row(_name(entry), state(_state(entry)), places, memory, quants, backend, context, _abilities(entry))
    console().print(rows)
    for line in (*fleet_view.missing_files(listed), *fleet_view.failed_loads(listed)):
        console().print(Text(line, style="red"), soft_wrap=True)


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['id']} → {entry['alias_of']}" if "alias_of" in entry else str(entry["id"])


def _state(entry: dict[str, Any]) -> str:
    if entry.get("loaded"):
        return "ready"
    statuses = [str(location["status"]) for location in entry.get("locations", ())]
    here = [status for status in statuses if status not in ("suspended", "unreachable")]
    return (here or (["suspended"] if "suspended" in statuses else statuses) or ["cold"])[0]


def _places(entry: dict[str, Any]) -> str:
    """The nodes that hold it or, in parentheses, the nodes where it fits."""
    if here := [_place(location, _state(entry)) for location in entry.get("locations", ())]:
        return ", ".join(here)
    possible = entry.get("feasible_on", ())
    return f"({', '.join(possible)})" if possible else "fits nowhere"


def _place(location: dict[str, Any], shown: str) -> str:
    """A node, or those that run it together, with the model's state there, if different from the one shown, or its
    replicas."""
    status, name = str(location["status"]), " + ".join(location.get("nodes", ())) or str(location["node"])
    note = replicas_in_words(location.get("replica_devices", ())) if status == shown else status
    return f"{name} ({note})" if note else name


def _sizes(entry: dict[str, Any]) -> tuple[str, str]:
    """The memory it takes, weights and KV cache, by quantisation, and the quantisations that are known."""
    largest: dict[str, int] = {}
    for each in entry.get("sizes", ()):
        if each["bytes"]:
            quant = each["quant"] or ("dense" if each.get("dtype") else "")
            largest[quant] = max(largest.get(quant, 0), each["bytes"])
    return ", ".join(map(size, largest.values())), ", ".join(filter(None, largest))


def _context(entry: dict[str, Any]) -> str:
    limit = entry.get("limit") or {}
    tokens, full = limit.get("context"), limit.get("full_context")
    if tokens and full:
        return f"{tokens:,} of {full:,}"
    return f"{tokens:,}" if tokens else ""


def _abilities(entry: dict[str, Any]) -> str:
    return " ".join(name for name, able in (entry.get("capabilities") or {}).items() if able)
