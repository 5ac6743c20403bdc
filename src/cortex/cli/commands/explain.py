"""`cortex explain`: the placement decision for a model, with the numbers behind it."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import quote

import click
from rich.table import Table
from rich.text import Text

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command
from cortex.cli.output import console, json_option, print_json, size, table


@click.command(cls=Command)
@click.argument("model")
@click.option("--history", is_flag=True, help="Show past decisions about it, newest first.")
@gateway_options
@json_option
def explain(model: str, history: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Show what the gateway would do for a model now, and why.

    Lists every node with its verdict, and every device with the memory that the model needs, that it can have, and that
    the node keeps free. Changes nothing.
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
        out.print(f"no decision about {model} yet", markup=False)
    for decision in decisions:
        when = f"{datetime.fromtimestamp(decision['at']):%Y-%m-%d %H:%M:%S}  " if history else ""
        out.print(Text.assemble((when, "dim"), (decision["outcome"], "bold")), soft_wrap=True)
        out.print(_nodes(decision))


def _nodes(decision: dict[str, Any]) -> Table:
    rows = table("NODE", "DEVICE", ">TOTAL", ">KEPT FREE", ">HAVE", ">NEED", "VERDICT", "WHY")
    for node in decision["nodes"]:
        verdict = Text(node["verdict"].replace("_", " "), style="green" if node["node"] == decision["node"] else "")
        devices = node["devices"] or [{}]
        for number, device in enumerate(devices):
            first = number == 0
            rows.add_row(
                node["node"] if first else "",
                _device(device),
                _bytes(device.get("total_bytes")),
                _bytes(device.get("kept_free_bytes")),
                _bytes(device.get("have_bytes")),
                _bytes(device.get("need_bytes", node["need_bytes"] if first else None)),
                verdict if first else "",
                node["reason"] if first else "",
            )
        for occupant in node["occupants"]:
            leaves = "can be evicted" if occupant["may_leave"] else occupant["reason"]
            holds = Text(f"{occupant['model']} holds {_bytes(occupant['bytes'])}: {leaves}", style="dim")
            rows.add_row("", holds)
    return rows


def _device(device: dict[str, Any]) -> str:
    return f"{device['index']}{'*' if device['chosen'] else ''} {device['name']}" if device else ""


def _bytes(count: int | None) -> str:
    return "" if count is None else size(count)
