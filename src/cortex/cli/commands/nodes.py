"""`cortex nodes`, `ps`, `jobs`, `drain`, `undrain`: models, jobs and nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import click
from rich.text import Text

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, GatewayRejected, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.fleet_view import HeldModel, NodeView
from cortex.cli.output import answer, console, json_option, print_json, rate, size, state, table
from cortex.cli.views import describe, memory_of, parse_job
from cortex.wire.node.protocol import ModelState, ModelStatus
from cortex.wire.words import duration, plural

WAIT_S = 0.5
"""Interval of checks of a node that drains."""


@click.command(cls=Command)
@gateway_options
@json_option
def nodes(gateway: GatewayClient, as_json: bool) -> int:
    """List the nodes: health, devices, memory and models.

    MEMORY is the memory in use on all devices of a node. Exit code 1 if a node is down.
    """
    raw = gateway.get("/fleet/status")
    found = fleet_view.parse(raw).nodes
    if as_json:
        print_json(raw["nodes"])
    elif not found:
        console().print("no nodes: add some under [[neurons]] in cortex.toml, or start with `cortex up`")
    else:
        rows = table("NODE", "KIND", "HEALTH", "DEVICES", ">MEMORY", "MODELS")
        for node in found:
            rows.add_row(node.name, node.kind, _health(node), _devices(node), _memory(node), _models(node))
        console().print(rows)
    return ExitCode.OK if all(node.up or node.is_reserve for node in found) else ExitCode.FAILED


def _health(node: NodeView) -> Text:
    """`up`, `drained`, or `down: connection refused`."""
    if node.is_reserve:
        return Text(node.problem or node.sleep, style="blue")
    word = "down" if not node.up else "drained" if node.drained else "draining" if node.draining else "up"
    style = {"down": "red", "up": "green"}.get(word, "yellow")
    return Text(f"{word}: {node.problem}" if node.problem else word, style=style)


def _devices(node: NodeView) -> str:
    """`2 x H200, 1 x RTX 4090`."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(each.short_name for each in node.devices).items())


def _memory(node: NodeView) -> str:
    total_bytes = sum(device.total_bytes for device in node.devices)
    used_bytes = sum(device.used_bytes for device in node.devices)
    return f"{size(used_bytes)} of {size(total_bytes)}" if total_bytes and node.up else ""


def _models(node: NodeView) -> str:
    """`small, large (loading)`: those in memory or on their way there."""
    held = [model for model in node.models if model.state is not ModelState.FAILED] if node.up else []
    return ", ".join(
        model.id if model.state is ModelState.READY else f"{model.id} ({model.state.value})" for model in held
    )


@click.command(cls=Command)
@gateway_options
@json_option
def ps(gateway: GatewayClient, as_json: bool) -> None:
    """List the models in memory and their activity.

    TOK/S is the rate over the last few seconds of generation: tokens of all requests, without the first of each.
    """
    fleet = fleet_view.fetch(gateway)
    held = [(node, model) for node in fleet.nodes for model in node.models if model.state is not ModelState.FAILED]
    members = [(node, member) for node in fleet.nodes for member in node.members]
    if as_json:
        print_json(
            [
                *({"node": node.name, "up": node.up, "model": model} for node, model in held),
                *({"node": node.name, "up": node.up, "member": member} for node, member in members),
            ]
        )
        return
    if not held and not members:
        console().print("no model is in memory; load one with `cortex load MODEL`")
        return
    rows = table("MODEL", "NODE", "STATE", ">MEMORY", ">RUNNING", ">TOK/S", ">IDLE", "PINNED")
    for node, model in held:
        if not node.up:  # its work at the last poll is out of date
            word, style = (node.sleep, "blue") if node.is_reserve else ("down", "red")
            shown = Text(str(model.state), style=style)
            pinned = "yes" if model.pinned else ""
            rows.add_row(model.id, f"{node.name} ({word})", shown, memory_of(model), "", "", "", pinned)
            continue
        rows.add_row(
            model.id,
            " + ".join(model.nodes) or node.name,
            state(describe(model)),
            _memory_of_all(node, model, members),
            str(model.num_running or ""),
            rate(model.load.tokens_per_s),
            duration(model.idle_s) if model.idle_s >= 1 else "",
            "yes" if model.pinned else "",
        )
    led = {(node.name, model.id) for node, model in held if model.nodes}
    for node, member in members:
        if (member.nodes[0], member.id) not in led:  # its leader has not started, or is gone
            what = f"rank {member.rank} of {' + '.join(member.nodes)}, {describe(member)}" if node.up else "unreachable"
            rows.add_row(member.id, node.name, what, memory_of(member), "", "", "", "")
    console().print(rows)
    for node in fleet.nodes:
        if node.up and (kept := sum(device.kv_host_bytes for device in node.devices)):
            line = f"{node.name} keeps {size(kept)} of KV in RAM, for conversations that are not on its devices"
            console().print(Text(line, style="dim"), soft_wrap=True)
        if node.up and node.host is not None and (node.host.weight_bytes or node.host.sleeping_bytes):
            line = f"{node.name}: {size(node.host.used_bytes)} of {size(node.host.budget_bytes)} host memory in use"
            console().print(Text(f"{line}: {node.host.in_words}", style="dim"), soft_wrap=True)


def _memory_of_all(node: NodeView, model: HeldModel, members: Sequence[tuple[NodeView, ModelStatus]]) -> str:
    """What a model takes on all nodes of its group."""
    others = [member for _, member in members if member.id == model.id and member.nodes[0] == node.name]
    if not others or model.state is ModelState.ASLEEP:
        return memory_of(model)
    return size(sum(each.measured_bytes or 0 for each in (model, *others)))


@click.command(cls=Command)
@click.option("--cancel", metavar="ID", help="Cancel this job.")
@gateway_options
@json_option
def jobs(cancel: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """List loads, unloads, downloads and benches, or cancel one."""
    found = [_cancelled(gateway, cancel)] if cancel is not None else gateway.get("/fleet/jobs")["jobs"]
    if as_json:
        print_json(found)
        return
    if not found:
        console().print("no jobs")
        return
    rows = table("ID", "KIND", "MODEL", "NODE", "STATE", ">AGE", "BY")
    reasons = []
    for job in map(parse_job, found):
        what = job.describe() if job.state == "running" else job.state
        age = duration(max(0.0, time.time() - job.started_at))
        rows.add_row(job.id, job.kind, job.model, ", ".join(job.nodes), what, age, job.by)
        if job.error is not None and job.state != "cancelled":
            reasons.append(Text(f"{job.id}: {job.error.message}", style="red"))
    out = console()
    for part in (rows, *reasons):
        out.print(part)


def _cancelled(gateway: GatewayClient, job_id: str) -> Any:
    try:
        return gateway.delete(f"/fleet/jobs/{quote(job_id, safe='')}")
    except GatewayRejected as rejected:
        if rejected.status != 404:
            raise
        raise CommandError(rejected.message, "list them with `cortex jobs`", ExitCode.NOT_FOUND) from rejected


@click.command(cls=Command)
@click.argument("node")
@click.option("--wait", is_flag=True, help="Return when its running requests have ended.")
@gateway_options
@json_option
def drain(node: str, wait: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Send no new requests and loads to a node.

    Running requests end normally, and models stay loaded. The node stays drained until `cortex undrain`, also after
    restarts.
    """
    _drain(gateway, node, "drain", "gets no new requests", as_json)
    if wait:
        _wait_until_idle(gateway, node, as_json)


@click.command(cls=Command)
@click.argument("node")
@gateway_options
@json_option
def undrain(node: str, gateway: GatewayClient, as_json: bool) -> None:
    """Send requests and loads to a node again."""
    _drain(gateway, node, "undrain", "gets requests again", as_json)


def _wait_until_idle(gateway: GatewayClient, name: str, as_json: bool) -> None:
    """Also returns when the node is down or gone, because nothing runs there then."""
    shown = 0
    while running := _num_running(fleet_view.fetch(gateway), name):
        if running != shown and not as_json:
            console().print(f"{plural(running, 'request')} still running", soft_wrap=True)
        shown = running
        time.sleep(WAIT_S)
    if not as_json:
        console().print(f"{name} is idle", soft_wrap=True)


def _num_running(fleet: fleet_view.FleetView, name: str) -> int:
    held = [model for node in fleet.nodes if node.name == name and node.up for model in node.models]
    return sum(max(model.in_flight, model.load.running + model.load.waiting) for model in held)


def _drain(gateway: GatewayClient, node: str, order: str, result: str, as_json: bool) -> None:
    response = gateway.post(f"/fleet/nodes/{quote(node, safe='')}/{order}", {})
    answer(response, f"{node} {result}", as_json=as_json)
