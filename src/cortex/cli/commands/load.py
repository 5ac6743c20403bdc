"""`cortex load`, `unload`, `pin`, `unpin`: moving models by hand."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import click

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, gateway_options, model_path
from cortex.cli.failures import Command, CommandError
from cortex.cli.load_view import LoadView
from cortex.cli.output import console, json_option, print_json
from cortex.wire.node import ModelState

POLL_S = 0.25
NODE_PATIENCE_S = 20.0
"""A node that was told to load may show nothing of it for this long."""

node_option = click.option("--node", help="The node to act on; the gateway picks when absent.")
wait_option = click.option("--wait/--no-wait", default=True, help="Stay until it is done, which is the default.")


@click.command(cls=Command)
@click.argument("model")
@node_option
@wait_option
@gateway_options
@json_option
def load(model: str, node: str | None, wait: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Bring a model into memory."""
    answer = gateway.post(model_path(model, "load"), _body(node=node))
    if wait:
        _wait_ready(gateway, answer["model"], answer.get("node"))
    _report(answer, as_json, f"{answer['model']} is ready" if wait else str(answer.get("outcome", "asked for")))


@click.command(cls=Command)
@click.argument("model")
@node_option
@click.option("--force", is_flag=True, help="End its running answers instead of waiting for them.")
@click.option("--sleep", is_flag=True, help="Keep its weights in host memory if the node has room, to load it faster.")
@click.option("--park", is_flag=True, hidden=True, help="Former name of --sleep.")
@wait_option
@gateway_options
@json_option
def unload(
    model: str,
    node: str | None,
    force: bool,
    sleep: bool,
    park: bool,
    wait: bool,
    gateway: GatewayClient,
    as_json: bool,
) -> None:
    """Free the device memory a model takes.

    Everywhere, or on one node; waits for running answers unless forced.
    """
    if park:
        click.echo("cortex: --park is now called --sleep", err=True)
    may_sleep = sleep or park
    answer = gateway.post(model_path(model, "unload"), _body(node=node, force=force, sleep=may_sleep or None))
    asleep = _wait_gone(gateway, answer["model"], answer["nodes"], may_sleep) if wait else ()
    places = ", ".join(f"{name} (asleep)" if name in asleep else name for name in answer["nodes"])
    _report(answer, as_json, f"{answer['model']} unloaded: {places or 'nowhere: it was not loaded'}")


@click.command(cls=Command)
@click.argument("model")
@node_option
@gateway_options
@json_option
def pin(model: str, node: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """Keep a model loaded: it never makes room for others."""
    answer = gateway.post(model_path(model, "pin"), _body(node=node))
    _report(answer, as_json, f"{answer['model']} is pinned on {', '.join(answer['nodes']) or 'no node'}")


@click.command(cls=Command)
@click.argument("model")
@gateway_options
@json_option
def unpin(model: str, gateway: GatewayClient, as_json: bool) -> None:
    """Let a model make room for others again."""
    answer = gateway.post(model_path(model, "unpin"), {})
    _report(answer, as_json, f"{answer['model']} is no longer pinned")


def _wait_ready(gateway: GatewayClient, model: str, node: str | None) -> None:
    """Show progress until the model is ready on `node`, or anywhere when the gateway has not chosen yet."""
    deadline = time.monotonic() + NODE_PATIENCE_S
    with LoadView(console()) as view:
        view.starting([model])
        while True:
            fleet = fleet_view.look(gateway)
            held = [status for place, status in fleet.places(model) if node in (None, place.name)]
            for status in held:
                view.update(status)
            if any(status.state is ModelState.READY for status in held):
                return
            if held and all(status.state is ModelState.FAILED for status in held):
                reason = held[0].reason or "the node gave no reason"
                raise CommandError(f"{model} could not be loaded: {reason.rstrip('.')}", "see `cortex explain`")
            if held or fleet.waiting.get(model):
                deadline = time.monotonic() + NODE_PATIENCE_S
            elif time.monotonic() > deadline:
                raise CommandError(f"{model} was asked for but no node shows it", f"see `cortex explain {model}`")
            time.sleep(POLL_S)


def _wait_gone(gateway: GatewayClient, model: str, nodes: Collection[str], may_sleep: bool) -> Collection[str]:
    """Wait until no device of `nodes` holds the model; the nodes where it sleeps then."""
    absent = {ModelState.COLD, ModelState.FAILED} | ({ModelState.ASLEEP} if may_sleep else set())
    with console().status(f"unloading {model}"):
        while True:
            held = {place.name: status.state for place, status in fleet_view.look(gateway).places(model)}
            if all(held.get(name, ModelState.COLD) in absent for name in nodes):
                return [name for name in nodes if held.get(name) is ModelState.ASLEEP]
            time.sleep(POLL_S)


def _body(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _report(answer: Any, as_json: bool, line: str) -> None:
    if as_json:
        print_json(answer)
    else:
        console().print(line, markup=False, soft_wrap=True)
