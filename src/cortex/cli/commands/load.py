"""`cortex load`, `unload`, `pin`, `unpin`: control of models by hand."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import click

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, gateway_options, model_path
from cortex.cli.failures import Command, CommandError
from cortex.cli.load_view import LoadView, reason_of
from cortex.cli.output import console, json_option, print_json
from cortex.wire.node import ModelState

POLL_S = 0.25
REPORT_TIMEOUT_S = 20.0
"""A node must report a requested load within this time."""

node_option = click.option("--node", help="The node to act on; the gateway chooses when absent.")
wait_option = click.option("--wait/--no-wait", default=True, help="Wait until it is done (the default).")


@click.command(cls=Command)
@click.argument("model")
@node_option
@wait_option
@gateway_options
@json_option
def load(model: str, node: str | None, wait: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Load a model."""
    response = gateway.post(model_path(model, "load"), _body(node=node))
    if wait:
        _wait_ready(gateway, response["model"], response.get("node"))
    _report(
        response, as_json, f"{response['model']} is ready" if wait else str(response.get("outcome", "load requested"))
    )


@click.command(cls=Command)
@click.argument("model")
@node_option
@click.option("--force", is_flag=True, help="Cancel its running requests instead of waiting for them.")
@click.option(
    "--sleep", is_flag=True, help="Keep the weights in host memory if there is room; it wakes faster than it loads."
)
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
    """Unload a model from every node, or from one.

    Waits for running requests unless --force is given.
    """
    if park:
        click.echo("cortex: --park is now called --sleep", err=True)
    may_sleep = sleep or park
    response = gateway.post(model_path(model, "unload"), _body(node=node, force=force, sleep=may_sleep or None))
    asleep = _wait_unloaded(gateway, response["model"], response["nodes"], may_sleep) if wait else ()
    places = ", ".join(f"{name} (asleep)" if name in asleep else name for name in response["nodes"])
    _report(response, as_json, f"{response['model']} unloaded: {places or 'it was on no node'}")


@click.command(cls=Command)
@click.argument("model")
@node_option
@gateway_options
@json_option
def pin(model: str, node: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """Keep a model loaded: it is never evicted."""
    response = gateway.post(model_path(model, "pin"), _body(node=node))
    _report(response, as_json, f"{response['model']} is pinned on {', '.join(response['nodes']) or 'no node'}")


@click.command(cls=Command)
@click.argument("model")
@gateway_options
@json_option
def unpin(model: str, gateway: GatewayClient, as_json: bool) -> None:
    """Let a model be evicted again."""
    response = gateway.post(model_path(model, "unpin"), {})
    _report(response, as_json, f"{response['model']} is no longer pinned")


def _wait_ready(gateway: GatewayClient, model: str, node: str | None) -> None:
    """Show progress until the model is ready on `node`, or anywhere when the gateway has not chosen yet."""
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    with LoadView(console()) as view:
        view.starting([model])
        while True:
            fleet = fleet_view.fetch(gateway)
            held = [status for place, status in fleet.places(model) if node in (None, place.name)]
            for status in held:
                view.update(status)
            if any(status.state is ModelState.READY for status in held):
                return
            if held and all(status.state is ModelState.FAILED for status in held):
                reason = reason_of(held[0]).rstrip(".")
                raise CommandError(f"{model} could not be loaded: {reason}", f"see `cortex explain {model}`")
            if held or fleet.waiting.get(model):
                deadline = time.monotonic() + REPORT_TIMEOUT_S
            elif time.monotonic() > deadline:
                raise CommandError(f"no node reports {model}", f"see `cortex explain {model}`")
            time.sleep(POLL_S)


def _wait_unloaded(gateway: GatewayClient, model: str, nodes: Collection[str], may_sleep: bool) -> Collection[str]:
    """Wait until no device of `nodes` holds the model; return the nodes where it is asleep."""
    absent = {ModelState.COLD, ModelState.FAILED} | ({ModelState.ASLEEP} if may_sleep else set())
    with console().status(f"unloading {model}"):
        while True:
            held = {place.name: status.state for place, status in fleet_view.fetch(gateway).places(model)}
            if all(held.get(name, ModelState.COLD) in absent for name in nodes):
                return [name for name in nodes if held.get(name) is ModelState.ASLEEP]
            time.sleep(POLL_S)


def _body(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _report(response: Any, as_json: bool, line: str) -> None:
    if as_json:
        print_json(response)
    else:
        console().print(line, markup=False, soft_wrap=True)
