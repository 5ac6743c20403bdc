"""`cortex audit`: who changed the fleet and its keys, and who signed in."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import click

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.commands.logs import moment
from cortex.cli.failures import Command
from cortex.cli.output import console, json_option, print_json, table


@click.command(cls=Command)
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@click.option("--key", help="Only what the key of this name or id did.")
@click.option("--since", help="From then on: 30m, 12h, 7d, a date, or a time.")
@gateway_options
@json_option
def audit(limit: int, key: str | None, since: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """Show who changed models, nodes and keys, or signed in.

    The oldest action comes first; STATUS is its outcome.

    Needs an operator's key. Rejected attempts of valid keys and failed sign-ins are shown too. Keys that were changed
    in the configuration file have no client. audit_days under [ledger] of the gateway says how long the log is kept.
    """
    options: dict[str, Any] = {"limit": limit}
    if key is not None:
        options["key"] = key
    if since is not None:
        options["since"] = moment(since, time.time())
    entries: list[dict[str, Any]] = gateway.get(f"/fleet/audit?{urlencode(options)}")["entries"][::-1]
    if as_json:
        print_json(entries)
        return
    if not entries:
        console().print("nothing was changed, and nobody signed in")
        return
    shown = table("TIME", "KEY", "CLIENT", ">STATUS", "ACTION", "DETAIL")
    for entry in entries:
        at = datetime.fromtimestamp(entry["at"]).isoformat(" ", "seconds")
        shown.add_row(
            at, entry["key_name"], entry["client"], str(entry["status"] or ""), entry["action"], entry["detail"]
        )
    console().print(shown)
