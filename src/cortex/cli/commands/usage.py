"""`cortex usage`: requests, tokens and their cost from the gateway's ledger."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import click
import msgspec

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.ledger_source import ask, configuration, ledger
from cortex.cli.output import console, json_option, print_json, table
from cortex.gateway.api.usage import cost_of
from cortex.gateway.config import load
from cortex.gateway.configuration_files import load_catalogue
from cortex.gateway.ledger.usage_report import HEADER, UsageRow
from cortex.gateway.ledger.usage_report import usage as read_usage
from cortex.wire.words import plural

DAY_S = 86400
Group = Literal["key", "model", "node", "day"]


@click.command(cls=Command)
@click.option("--by", type=click.Choice(["key", "model", "node", "day"]), default="key", show_default=True)
@click.option("--days", type=click.FloatRange(0, min_open=True), default=30, show_default=True, help="How far back.")
@click.option("-c", "--config", type=click.Path(path_type=Path), help="Read the ledger of this cortex.toml.")
@gateway_options
@json_option
def usage(by: Group, days: float, config: Path | None, gateway: GatewayClient, as_json: bool) -> None:
    """Show tokens and cost by key, model, node or day.

    The cost follows from the prices in models.toml. With --config, or a cortex.toml in the working directory, the
    ledger database is read directly, and the gateway may be running. Otherwise the gateway is asked: an operator's key
    shows all usage, another key its own.
    """
    now = time.time()
    since, until = now - days * DAY_S, now + 60
    path = configuration(config)
    rows = _from_gateway(gateway, by, since, until) if path is None else _from_ledger(path, by, since, until)
    if as_json:
        print_json(rows)
        return
    if not rows:
        console().print(f"no usage in the last {plural(int(days) if days == int(days) else days, 'day')}")
        return
    shown = table(by.upper(), *(f">{title.upper()}" for title in HEADER))
    for row in rows:
        shown.add_row(row.name, *row.cells())
    console().print(shown)


def _from_gateway(gateway: GatewayClient, by: Group, since: float, until: float) -> tuple[UsageRow, ...]:
    options = urlencode({"by": by, "since": f"{since:.0f}", "until": f"{until:.0f}"})
    response = ask(gateway, f"/fleet/usage?{options}")
    if not response["is_recorded"]:
        raise CommandError(
            f"the gateway at {gateway.url} records no usage",
            "it does so once it has keys: cortex keys add NAME --config cortex.toml",
            ExitCode.NOT_FOUND,
        )
    return msgspec.convert(response["rows"], tuple[UsageRow, ...])


def _from_ledger(config: Path, by: Group, since: float, until: float) -> tuple[UsageRow, ...]:
    loaded = load(config, os.environ)
    database = loaded.database(config.parent)
    catalogue = load_catalogue(loaded, config)
    if "://" not in database and not Path(database).exists():
        raise CommandError(
            f"there is no ledger at {database}",
            "it is made once there are keys; if the gateway's state is elsewhere, set gateway.state in the file or "
            "CORTEX_GATEWAY__STATE here too",
            ExitCode.NOT_FOUND,
        )
    with ledger(database) as store:
        return read_usage(store, group=by, since=since, until=until, cost_of=partial(cost_of, catalogue))
