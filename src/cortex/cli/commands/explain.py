"""`cortex explain` and `cortex fits`: the placement decision for a model, with the bytes behind it."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.text import Text

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, json_option, print_json, rate, size, table
from cortex.cli.views.bench import parse_bench, show_bench, when_measured


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.option("--history", is_flag=True, help="Show past decisions about it, newest first.")
@gateway_options
@json_option
def explain(model: str, history: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Show what the gateway would do for a model now, and why.

    Lists every node with its verdict, and every device with the memory that the model needs, that it can have, and that
    the node keeps free; how fast the model is there, if `cortex bench` has measured it; and what the node keeps of its
    conversations in host memory. Changes nothing.
    """
    if history:
        decisions = gateway.get(f"/fleet/decisions?model={quote(model, safe='')}")["decisions"]
    else:
        decisions = [gateway.get(f"/fleet/explain/{quote(model, safe='')}")]
    if as_json:
        print_json(decisions if history else decisions[0])
        return
    out = console()
    if not decisions:
        out.print(f"no decision about {model} yet")
    for decision in decisions:
        when = f"{datetime.fromtimestamp(decision['at']):%Y-%m-%d %H:%M:%S}  " if history else ""
        show_decision(out, decision, when)


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@gateway_options
@json_option
def fits(model: str, gateway: GatewayClient, as_json: bool) -> None:
    """Show on which nodes a model fits, and how.

    Lists for each node whether all weights fit on its devices or a part needs host memory, and the expected speed.
    Exits with code 7 if the model fits nowhere. Changes nothing.
    """
    decision = gateway.get(f"/fleet/explain/{quote(model, safe='')}?origin=operator")
    if as_json:
        print_json(decision)
    else:
        rows = table("NODE", "FITS", ">DEVICE", ">HOST", ">CONTEXT", ">TOKENS/S")
        for node in decision["nodes"]:
            rows.add_row(*_fit(node))
        console().print(rows)
    if decision["action"] == "reject":
        remedy = f"run `cortex explain {model}` for the bytes of every node"
        raise CommandError(decision["outcome"].removesuffix("."), remedy, ExitCode.NO_ROOM)
    if not as_json:
        console().print(Text(decision["outcome"]), soft_wrap=True)


_FITS = {"resident": "is ready", "starting": "is starting", "asleep": "asleep", "fits_soon": "after an unload"}
_FITS |= {"fits": "yes", "fits_after_eviction": "after eviction", "blocked": "later", "crowded": "later"}


def _fit(node: dict[str, Any]) -> tuple[str, ...]:
    host = node.get("host") or {}
    held = _FITS.get(node["verdict"], "no")
    if held in ("no", "later"):
        return node["node"], held, _bytes(node["need_bytes"]), "", "", ""
    is_split = host.get("need_bytes") is not None
    expected, bench = host.get("tokens_per_s"), parse_bench(node.get("bench"))
    speed = f"~{rate(expected)}" if expected else rate(bench.stream_rate) if bench is not None else ""
    tokens = node["context_tokens"]
    return (
        node["node"],
        f"{held}, with host memory" if is_split else held,
        _bytes(node["takes_bytes"]),
        _bytes(host["need_bytes"]) if is_split else "",
        f"{tokens:,}" if tokens else "",
        speed,
    )


def show_decision(out: Console, decision: dict[str, Any], when: str = "") -> None:
    """The outcome, then every node."""
    out.print(Text.assemble((when, "dim"), (decision["outcome"], "bold")), soft_wrap=True)
    for node in decision["nodes"]:
        _show_node(out, node, is_chosen=node["node"] == decision["node"])


def _show_node(out: Console, node: dict[str, Any], *, is_chosen: bool) -> None:
    """The verdict on a line, then the devices and the models on them: readable at 80 columns, whatever the reason."""
    verdict = (node["verdict"].replace("_", " "), "green" if is_chosen else "bold")
    reason = f": {node['reason']}" if node["reason"] else ""
    out.print(Text.assemble((node["node"], "bold"), "  ", verdict, reason), soft_wrap=True)
    if node["devices"]:
        memory = {"TOTAL": "total_bytes", "KEPT FREE": "kept_free_bytes", "HAVE": "have_bytes", "NEED": "need_bytes"}
        if any(device.get("ceiling_bytes") is not None for device in node["devices"]):
            memory = {"TOTAL": "total_bytes", "CEILING": "ceiling_bytes"} | memory
        rows = table("  DEVICE", *(f">{title}" for title in memory))
        for device in node["devices"]:
            rows.add_row(f"  {_device(device)}", *(_bytes(device.get(name)) for name in memory.values()))
        if (host := node.get("host")) is not None:
            rows.add_row("  host memory", *(_bytes(host.get(name)) for name in memory.values()))
        out.print(rows)
    elif node["need_bytes"] is not None:
        out.print(f"  needs {_bytes(node['need_bytes'])}")
    if node.get("ceiling_bytes") is not None:
        out.print(f"  models take at most {_bytes(node['ceiling_bytes'])} of the node")
    if (bench := parse_bench(node.get("bench"))) is not None:
        out.print(f"  {when_measured(bench)}:", soft_wrap=True)
        show_bench(out, bench)
    if (kept := node.get("kv_host")) is not None:
        out.print(f"  {_kept(kept)}", soft_wrap=True)
    for occupant in node["occupants"]:
        leaves = "can be evicted" if occupant["may_leave"] else occupant["reason"]
        host = f" and {_bytes(occupant['host_bytes'])} of host memory" if occupant.get("host_bytes") else ""
        holds = f"  {occupant['model']} holds {_bytes(occupant['bytes'])}{host}: {leaves}"
        out.print(Text(holds, style="dim"), soft_wrap=True)


def _kept(kept: dict[str, Any]) -> str:
    """What the node keeps of the model's KV cache."""
    tokens = f" ({kept['num_tokens']:,} tokens)" if kept.get("num_tokens") else ""
    rate = f", copied back at {kept['tokens_per_s']:,.0f} tokens/s" if kept.get("tokens_per_s") else ""
    return f"keeps {size(kept['num_bytes'])} of its KV cache{tokens} in host memory{rate}"


def _device(device: dict[str, Any]) -> str:
    return f"{device['index']}{'*' if device['chosen'] else ''} {device['name']}"


def _bytes(count: int | None) -> str:
    return "" if count is None else size(count)
