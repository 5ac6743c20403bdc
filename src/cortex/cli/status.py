"""`cortex status`: the fleet as a table."""

from __future__ import annotations

import time

import click
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortex.wire.node import ModelState

from . import fleetview
from .client import Gateway, gateway_options
from .failures import Command, CommandError, ExitCode
from .fleetview import FleetView, HeldModel, NodeView
from .loadview import describe, fraction_done
from .output import bar, console, duration, json_option, print_json, size, state, table


@click.command(cls=Command)
@click.option("-w", "--watch", is_flag=True, help="Keep it on the screen and up to date, until Ctrl-C.")
@click.option("--every", "interval_s", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds.")
@gateway_options
@json_option
def status(watch: bool, interval_s: float, gateway: Gateway, as_json: bool) -> int:
    """Show nodes, devices and models.

    Devices come with their memory, models with their state and load progress. Exit code 1 when a node is down.
    """
    if watch and as_json:
        raise CommandError("--watch and --json do not go together", "leave one out", ExitCode.USAGE)
    if watch:
        _watch(gateway, interval_s)
        return ExitCode.OK
    raw = gateway.get("/fleet/status")
    fleet = fleetview.parse(raw)
    if as_json:
        print_json(raw)
    else:
        console().print(picture(fleet))
    return ExitCode.OK if all(node.up for node in fleet.nodes) else ExitCode.FAILED


def _watch(gateway: Gateway, interval_s: float) -> None:
    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown: RenderableType = picture(fleetview.look(gateway))
            except CommandError as error:
                shown = Text(f"{error.message}; {error.remedy}", style="red")
            live.update(Lines(shown, Text("\nCtrl-C to leave", style="dim")), refresh=True)
            time.sleep(interval_s)


def picture(fleet: FleetView) -> RenderableType:
    """The whole fleet, node by node."""
    if not fleet.nodes:
        return Text("no nodes: add some under [[neurons]] in cortex.toml, or start with `cortex up`")
    return Lines(*(_node(node, fleet) for node in fleet.nodes), *_waiting(fleet))


def _node(node: NodeView, fleet: FleetView) -> RenderableType:
    if not node.up:
        condition = Text.assemble(("down", "bold red"), f"  {node.problem or ''}")
    elif node.draining:
        condition = Text("going down, takes no new work", style="yellow")
    else:
        condition = Text.assemble(("up", "green"), f"  {node.problem or ''}")
    kind = "" if node.kind == "neuron" else f"  ({node.kind} server)"
    parts: list[RenderableType] = [Text.assemble((node.name, "bold"), kind, "  ", condition)]
    if node.devices:
        parts.append(Padding(_devices(node), (0, 0, 0, 2)))
    if node.models:
        parts.append(Padding(_models(node, fleet), (0, 0, 0, 2)))
        parts += [
            Padding(Text(f"{model.id}: {model.reason}", style="red"), (0, 0, 0, 2))
            for model in node.models
            if model.reason
        ]
    if node.cold_models:
        parts.append(Padding(Text(f"can load: {', '.join(sorted(node.cold_models))}", style="dim"), (0, 0, 0, 2)))
    return Padding(Lines(*parts), (0, 0, 1, 0))


def _devices(node: NodeView) -> Table:
    rows = table(">", "", "", ">", "")
    rows.show_header = False
    for device in node.devices:
        used_bytes = device.total_bytes - device.free_bytes
        others = f"{size(device.foreign_bytes)} by other programs" if device.foreign_bytes > 1 << 30 else ""
        rows.add_row(
            str(device.index),
            device.name,
            bar(used_bytes / device.total_bytes) if device.total_bytes else "",
            f"{size(used_bytes)} of {size(device.total_bytes)}",
            Text(others, style="dim"),
        )
    return rows


def _models(node: NodeView, fleet: FleetView) -> Table:
    rows = table("MODEL", "STATE", "", ">MEMORY", ">CONTEXT", ">RUNNING", ">WAITING", ">TOK/S")
    for model in node.models:
        is_ready = model.state is ModelState.READY
        fraction = None if is_ready else fraction_done(model)
        waiting = model.load.waiting + fleet.waiting.get(model.id, 0)
        rows.add_row(
            model.id + (" (pinned)" if model.pinned else ""),
            state(describe(model)),
            bar(fraction, width=12, style="cyan") if fraction is not None else _idle(model),
            _memory(model),
            f"{model.context_tokens:,}" if model.context_tokens else "",
            str(max(model.load.running, model.in_flight)) if is_ready else "",
            str(waiting) if is_ready or waiting else "",
            f"{model.load.tokens_per_s:.0f}" if model.load.tokens_per_s else "",
        )
    return rows


def _memory(model: HeldModel) -> str:
    if model.measured_bytes is not None:
        return size(model.measured_bytes)
    return f"~{size(model.estimate_bytes)}" if model.estimate_bytes is not None else ""


def _idle(model: HeldModel) -> Text:
    is_idle = model.state is ModelState.READY and model.idle_s >= 60
    return Text(f"idle {duration(model.idle_s)}" if is_idle else "", style="dim")


def _waiting(fleet: FleetView) -> list[Text]:
    """Models that requests wait for and that are on no node yet."""
    held = {model.id for node in fleet.nodes for model in node.models}
    return [
        Text(f"{count} waiting for {model}", style="yellow")
        for model, count in fleet.waiting.items()
        if count and model not in held
    ]
