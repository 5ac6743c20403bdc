"""`cortex status`: nodes, devices and models as tables. `cortex cancel`: end requests that run."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, GatewayRejected, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.fleet_view import FleetView, HeldModel, NodeView, without_name
from cortex.cli.model_name import MODEL
from cortex.cli.output import answer, bar, console, json_option, print_json, rate, size, state, table
from cortex.cli.views import context_of, describe, fraction_done, memory_of, reason_of
from cortex.wire.node.protocol import ModelState
from cortex.wire.words import duration, plural, replicas_in_words


@click.command(cls=Command)
@click.option("-w", "--watch", is_flag=True, help="Keep the screen up to date until Ctrl-C.")
@click.option(
    "--every",
    "interval_s",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    help="Seconds between updates of --watch.",
)
@gateway_options
@json_option
def status(watch: bool, interval_s: float, gateway: GatewayClient, as_json: bool) -> int:
    """Show nodes, devices and models.

    Shows memory of devices, and state and load progress of models. Exit code 1 if a node is down.
    """
    if watch and as_json:
        raise CommandError("--watch and --json exclude each other", "leave one of them out", ExitCode.USAGE)
    if watch:
        _watch(gateway, interval_s)
        return ExitCode.OK
    raw = gateway.get("/fleet/status")
    fleet = fleet_view.parse(raw)
    if as_json:
        print_json(raw)
    else:
        console().print(render(fleet))
    return ExitCode.OK if all(node.up for node in fleet.nodes) else ExitCode.FAILED


def _watch(gateway: GatewayClient, interval_s: float) -> None:
    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown: RenderableType = render(fleet_view.fetch(gateway))
            except CommandError as error:
                shown = Text(str(error), style="red")
            live.update(Lines(shown, Text("\nCtrl-C to quit", style="dim")), refresh=True)
            time.sleep(interval_s)


def render(fleet: FleetView) -> RenderableType:
    """The whole fleet, node by node."""
    if not fleet.nodes:
        return Text("no nodes: add some under [[neurons]] in cortex.toml, or start with `cortex up`")
    return Lines(*(_node(node, fleet) for node in fleet.nodes), *_waiting(fleet))


def _node(node: NodeView, fleet: FleetView) -> RenderableType:
    if node.is_reserve:
        condition = Text(node.problem or node.sleep, style="blue")
    elif not node.up:
        condition = Text.assemble(("down", "bold red"), f"  {node.problem or ''}")
    elif node.drained:
        condition = Text(f"drained, takes no new requests until `cortex undrain {node.name}`", style="yellow")
    elif node.draining:
        condition = Text("draining, takes no new requests", style="yellow")
    else:
        condition = Text.assemble(("up", "green"), f"  {node.problem or ''}")
    if node.watts is not None:
        condition = Text.assemble(condition, (f"  {node.watts:.0f} W", "dim"))
    kind = "" if node.kind == "neuron" else f"  ({node.kind} server)"
    parts: list[RenderableType] = [Text.assemble((node.name, "bold"), kind, "  ", condition)]
    if node.devices:
        parts.append(_indented(_devices(node)))
    if node.ceiling_bytes is not None:
        parts.append(_indented(f"models take at most {size(node.ceiling_bytes)} of this node", "dim"))
    if node.host is not None and node.host.shortage:
        parts.append(_indented(node.host.shortage, "yellow"))
    if node.models:
        parts.append(_indented(_models(node, fleet)))
        parts += [_indented(f"{model.id}: {reason_of(model)}", "red") for model in node.models if model.reason]
        short = [each for each in node.models if each.state is ModelState.READY and each.context_shortage]
        parts += [_indented(f"{model.id}: {model.context_shortage}", "yellow") for model in short]
        changed = "its files have changed; unload and load it to use them"
        parts += [_indented(f"{model.id}: {changed}", "yellow") for model in node.models if model.files_changed]
    for member in node.members if node.up else ():
        held = f", {size(member.measured_bytes)}" if member.measured_bytes else ""
        part = f"part of {member.id}, which {member.nodes[0]} serves: {describe(member)}{held}"
        parts.append(_indented(part))
        parts += [Padding(Text(line, style="dim"), (0, 0, 0, 4)) for line in member.log_lines]
    here = {member.id for member in node.members}
    if cold := sorted(model for model in node.cold_models if model not in here):
        parts.append(_indented(f"cold: {', '.join(cold)}", "dim"))
    for model, reason in (node.absent_models | node.cold_reasons).items() if node.up else ():
        parts.append(_indented(f"{model}: {without_name(model, reason)}", "red"))
    return Padding(Lines(*parts), (0, 0, 1, 0))


def _indented(shown: RenderableType, style: str = "") -> Padding:
    return Padding(Text(shown, style=style) if isinstance(shown, str) else shown, (0, 0, 0, 2))


def _devices(node: NodeView) -> Table:
    rows = table(">", "", "", ">", "")
    rows.show_header = False
    for device in node.devices:
        notes = [
            f"{device.watts:.0f} W" if device.watts is not None and node.up else "",
            f"{size(device.foreign_bytes)} other programs" if device.foreign_bytes > 1 << 30 else "",
            f"{size(device.extra_replica_bytes)} extra replicas" if device.extra_replica_bytes else "",
            f"{size(device.kv_host_bytes)} of KV in RAM" if device.kv_host_bytes else "",
            f"models take at most {size(device.ceiling_bytes)}" if device.ceiling_bytes is not None else "",
        ]
        rows.add_row(
            str(device.index),
            device.short_name,
            bar(device.used_bytes / device.total_bytes, 16) if device.total_bytes else "",
            f"{size(device.used_bytes)} of {size(device.total_bytes)}",
            Text(", ".join(filter(None, notes)), style="dim"),
        )
    if (host := node.host) is not None and host.used_bytes:
        share = bar(host.used_bytes / host.budget_bytes, 16) if host.budget_bytes else ""
        used = f"{size(host.used_bytes)} of {size(host.budget_bytes)}"
        rows.add_row("", "host memory", share, used, Text(host.in_words, style="dim"))
    for column in rows.columns[:-1]:  # in a narrow terminal the notes take a second line
        column.no_wrap = True
    return rows


def _models(node: NodeView, fleet: FleetView) -> Table:
    rows = table("MODEL", "STATE", ">MEMORY", ">CONTEXT", "REQUESTS", ">TOK/S")
    for model in node.models:
        rows.add_row(
            model.id,
            _state(model),
            memory_of(model),
            context_of(model),
            _requests(model, fleet.waiting.get(model.id, 0)) if node.up else "",
            rate(model.load.tokens_per_s) if node.up else "",
        )
    # On a narrow terminal the name folds, state and requests wrap, and numbers stay on one line.
    rows.columns[0].overflow = "fold"
    rows.columns[0].min_width = min(20, max(len(model.id) for model in node.models))
    for number in (2, 3, 5):
        rows.columns[number].no_wrap = True
    return rows


def _state(model: HeldModel) -> Text:
    """`ready, 2 replicas on devices 0, 1, pinned`, `loading ██████▌  64% read, 3 s`, or what a load waits for."""
    shown = state(str(model.state))
    if model.state is ModelState.READY and (replicas := replicas_in_words(model.replica_devices)):
        shown.append(f", {replicas}")
    if model.pinned:
        shown.append(", pinned")
    fraction = None if model.state is ModelState.READY else fraction_done(model)
    if fraction is not None and model.progress is not None:
        shown = Text.assemble(shown, " ", bar(fraction, 8, "cyan"), f" {fraction:.0%} {model.progress.finest_stage}")
        if model.progress.eta_s is not None:
            shown.append(f", {duration(model.progress.eta_s)}")
    elif model.progress is not None and model.progress.waits_for is not None:
        shown.append(f", {model.progress.waits_for}")
    return shown


def _requests(model: HeldModel, waiting_here: int) -> str:
    """`3 running, 4 waiting (2 flex)`, or `idle 12 min`."""
    running = model.num_running
    waiting = model.load.waiting + waiting_here
    classes = {name: number for name, number in model.load.waiting_by_class.items() if name != "default"}
    of_them = f" ({', '.join(f'{number} {name}' for name, number in classes.items())})" if classes else ""
    counts = [f"{running} running" if running else "", f"{waiting} waiting{of_them}" if waiting else ""]
    if model.state is ModelState.READY and not any(counts):
        return f"idle {duration(model.idle_s)}" if model.idle_s >= 1 else "idle"
    return ", ".join(filter(None, counts))


def _waiting(fleet: FleetView) -> list[Text]:
    """Models with waiting requests that are on no node yet, or whose requests wait for a reason."""
    held = {model.id for node in fleet.nodes for model in node.models}
    reasons = {model: f": {reason}" for model, reason in fleet.waiting_reasons.items()}
    return [
        Text(f"{count} waiting for {model}{reasons.get(model, '')}", style="yellow")
        for model, count in fleet.waiting.items()
        if count and (model not in held or model in reasons)
    ]


PATH = "/fleet/activity/running"
_PHASES = {"wait": "waits", "prefill": "reads the prompt", "decode": "generates"}


@click.command(cls=Command)
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--model", type=MODEL, help="Every request for this model.")
@gateway_options
@json_option
def cancel(ids: tuple[str, ...], model: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """Cancel running requests, at their nodes too.

    Without an ID or --model, lists the running requests with their ids. The client of a cancelled request gets an
    error. Keys other than operators' see and cancel only their own requests.
    """
    running = gateway.get(PATH)["requests"]
    if not ids and model is None:
        _show(running, as_json)
        return
    wanted = [*ids, *(each["id"] for each in running if each["model"] == model)]
    known = {each["id"] for each in running}
    if missing := [id for id in ids if id not in known]:
        raise CommandError(f"no request {missing[0]} runs", "`cortex cancel` lists those that do", ExitCode.NOT_FOUND)
    num_cancelled = sum(_cancel(gateway, id) for id in dict.fromkeys(wanted))
    answer({"cancelled": num_cancelled}, f"{plural(num_cancelled, 'request')} cancelled", as_json=as_json)


def _cancel(gateway: GatewayClient, id: str) -> int:
    """The number of cancelled requests: 0 if it has just ended by itself."""
    try:
        return int(gateway.delete(f"{PATH}/{id}")["cancelled"])
    except GatewayRejected as error:
        if error.status == 404:
            return 0
        raise


def _show(running: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(running)
        return
    if not running:
        console().print("no requests run")
        return
    rows = table("ID", ">AGE", "PHASE", "NODE", "KEY", "MODEL")
    for each in running:
        phase = _PHASES.get(each["phase"], each["phase"])
        rows.add_row(each["id"], duration(each["duration_s"]), phase, each["node"] or "-", each["key"], each["model"])
    console().print(rows)
