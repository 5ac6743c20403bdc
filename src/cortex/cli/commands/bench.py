"""`cortex bench`: how fast models are on their nodes."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, GatewayRejected, gateway_options, model_path
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, json_option, print_json
from cortex.cli.views import follow, parse_bench, show_bench, when_measured
from cortex.wire.errors import ModelUnsupported
from cortex.wire.node.protocol import ModelState


@click.command(cls=Command)
@click.argument("model", type=MODEL, required=False)
@click.option("--node", help="Node to measure on. [default: all where the model is ready]")
@click.option("--reload/--no-reload", default=True, help="Also measure load and wake (the default).")
@click.option("--force", is_flag=True, help="Measure even while the model has requests, which lower the result.")
@gateway_options
@json_option
def bench(
    model: str | None, node: str | None, reload: bool, force: bool, gateway: GatewayClient, as_json: bool
) -> None:
    """Measure how fast a model is on its nodes. Takes about a minute.

    Runs 1, 8 and 64 streams and a prompt of 2,048 tokens, as far as the model permits, then a wake and a load, and
    shows which share of the machine's own limit each reaches. A model that is not ready is loaded first. Without MODEL,
    every ready model is measured in turn; failures are reported and skipped. Nodes keep the results for `cortex
    explain` and for routing. Ctrl-C cancels.

    Wake and load take the model out of memory for a moment: requests wait, and its prefix cache moves to host memory.
    """
    models = [model] if model is not None else _ready_models(gateway, node)
    body: dict[str, Any] = {"wait": False, "reload": reload, "force": force} | ({} if node is None else {"node": node})
    out = console()
    measured: list[dict[str, Any]] = []
    failures: list[GatewayRejected] = []
    for name in models:
        found, failure = _measure(gateway, name, body)
        measured.append(found)
        for place, value in found["results"].items() if not as_json else ():
            if (result := parse_bench(value)) is not None:
                heading = (f"{found['model']} on {place}", "bold"), f", {when_measured(result)}"
                out.print(Text.assemble(*heading), soft_wrap=True)
                show_bench(out, result)
        if failure is not None:
            failures.append(failure)
            if len(models) > 1:
                click.echo(f"{name}: {failure}", err=True)
    if as_json:
        print_json(measured)
    if len(models) == 1 and failures:
        raise failures[0]
    count = sum(failure.code != ModelUnsupported.code for failure in failures)
    if count or len(failures) == len(models):
        what = f"{len(failures)} of {len(models)} models were not measured, or not everywhere"
        raise CommandError(what, "the reasons are above; measure one again with `cortex bench MODEL`")


def _measure(gateway: GatewayClient, model: str, body: dict[str, Any]) -> tuple[dict[str, Any], GatewayRejected | None]:
    """The results, and the errors by node. Raises CommandError for an error that affects every model."""
    failure = None
    try:
        job = gateway.post(model_path(model, "bench"), body)["job"]
    except GatewayRejected as rejected:
        if rejected.status in (401, 403):
            raise
        return {"model": model, "results": {}}, rejected
    try:
        follow(gateway, job)
    except GatewayRejected as rejected:
        failure = rejected
    return {"model": job["model"], "results": gateway.get(f"/fleet/jobs/{job['id']}")["results"]}, failure


def _ready_models(gateway: GatewayClient, node: str | None) -> list[str]:
    """Raises CommandError when there is none."""
    found = {
        held.id: None
        for place in fleet_view.fetch(gateway).nodes
        if node in (None, place.name) and place.kind == "neuron"
        for held in place.models
        if held.state is ModelState.READY and held.capabilities.chat
    }
    if not found:
        where = "" if node is None else f" on {node}"
        raise CommandError(f"no model is ready{where}", "name one: `cortex bench MODEL` loads it", ExitCode.NOT_FOUND)
    return list(found)
