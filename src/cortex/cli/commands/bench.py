"""`cortex bench`: how fast models are on their nodes."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, gateway_options, model_path
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, json_option, print_json
from cortex.cli.views.bench import parse_bench, show_bench, when_measured
from cortex.cli.views.jobs import follow
from cortex.wire.node.protocol import ModelState


@click.command(cls=Command)
@click.argument("model", type=MODEL, required=False)
@click.option("--node", help="Only on this node; on all where the model is ready when absent.")
@click.option("--reload/--no-reload", default=True, help="Also measure its load and its wake (the default).")
@click.option("--force", is_flag=True, help="Also while it has requests; the result is then of what they leave.")
@gateway_options
@json_option
def bench(
    model: str | None, node: str | None, reload: bool, force: bool, gateway: GatewayClient, as_json: bool
) -> None:
    """Measure how fast a model is on its nodes. Takes about a minute.

    Runs 1, 8 and 64 streams and a prompt of 2,048 tokens, as far as the model takes them, then a wake and a load, and
    shows what share of the machine's own limit each of them reaches. A model that is ready nowhere is loaded first;
    without MODEL, every model that is ready is measured, one after the other. Nodes keep the results, for `cortex
    explain` and for routing. Ctrl-C cancels.

    For wake and load the model leaves memory for a moment: requests wait, and its prefix cache is lost.
    """
    models = [model] if model is not None else _ready_models(gateway, node)
    out = console()
    measured = []
    for name in models:
        body: dict[str, Any] = {"wait": False, "reload": reload, "force": force}
        response = gateway.post(model_path(name, "bench"), body if node is None else body | {"node": node})
        job = gateway.get(f"/fleet/jobs/{follow(gateway, response['job']).id}")
        measured.append({"model": response["model"], "results": job["results"]})
        if as_json:
            continue
        for place, found in job["results"].items():
            if (result := parse_bench(found)) is not None:
                heading = (f"{response['model']} on {place}", "bold"), f", {when_measured(result)}"
                out.print(Text.assemble(*heading), soft_wrap=True)
                show_bench(out, result)
    if as_json:
        print_json(measured)


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
