"""`cortex cancel`: end requests that run."""

from __future__ import annotations

from typing import Any

import click

from cortex.cli.client import GatewayClient, GatewayRejected, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, json_option, print_json, table
from cortex.wire.words import duration, plural

PATH = "/fleet/activity/running"
_PHASES = {"wait": "waits", "prefill": "reads the prompt", "decode": "generates"}


@click.command(cls=Command)
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--model", type=MODEL, help="Every request for this model.")
@gateway_options
@json_option
def cancel(ids: tuple[str, ...], model: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """End requests that run, at their nodes too.

    Without an ID or --model, lists the requests that run, with their ids. The client of a cancelled request gets an
    error. A key that is not an operator's sees and cancels its own requests.
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
    if as_json:
        print_json({"cancelled": num_cancelled})
    else:
        console().print(f"{plural(num_cancelled, 'request')} cancelled")


def _cancel(gateway: GatewayClient, id: str) -> int:
    """How many it ended: 0 for a request that has just ended by itself."""
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
