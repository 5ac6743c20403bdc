"""`cortex usage`: requests, tokens and their cost from the gateway's ledger."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import get_args
from urllib.parse import urlencode

import click
import msgspec

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.commands.logs import moment
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.ledger_source import ask, configuration, ledger
from cortex.cli.output import console, json_option, print_json, table
from cortex.gateway.config import load
from cortex.gateway.configuration_files import load_catalogue
from cortex.gateway.ledger.store import GroupBy
from cortex.gateway.ledger.usage_report import HEADER, UsageRow, as_csv
from cortex.gateway.ledger.usage_report import usage as read_usage
from cortex.wire.words import plural

DAY_S = 86400
_GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)


@click.command(cls=Command)
@click.option("--by", type=click.Choice(_GROUPS), default="key", show_default=True)
@click.option("--days", type=click.FloatRange(0, min_open=True), help="How far back; 30 if nothing else is given.")
@click.option("--since", help="From then on: 12h, 7d, a date, or a time.")
@click.option("--until", help="Until then: 12h, 7d, a date, or a time; until now if absent.")
@click.option("-c", "--config", type=click.Path(path_type=Path), help="Read the ledger of this cortex.toml.")
@click.option("--csv", "is_csv", is_flag=True, help="Print comma-separated values with a header.")
@gateway_options
@json_option
def usage(
    by: GroupBy,
    days: float | None,
    since: str | None,
    until: str | None,
    config: Path | None,
    is_csv: bool,
    gateway: GatewayClient,
    as_json: bool,
) -> None:
    """Show tokens and cost by key, group, model, node or day.

    `--by key-model` shows each model of each key. Times are to the minute, in the time zone of this machine. The cost
    follows from the prices in models.toml. With --config, or a cortex.toml in the working directory, the ledger
    database is read directly, and the gateway may be running. Otherwise the gateway is asked: an operator's key shows
    all usage, another key its own.
    """
    if days is not None and since is not None:
        raise click.UsageError("give --days or --since, not both")
    now = time.time()
    end = now + 60 if until is None else float(moment(until, now, "--until"))
    begin = min(end, now) - (days or 30) * DAY_S if since is None else float(moment(since, now))
    if begin >= end:
        raise click.BadParameter("it must be before --until", param_hint="--since")
    path = configuration(config)
    rows = _from_gateway(gateway, by, begin, end) if path is None else _from_ledger(path, by, begin, end)
    if as_json:
        print_json(rows)
    elif is_csv:
        click.echo(as_csv(by, rows), nl=False)
    elif not rows:
        span = days or 30
        is_recent = since is None and until is None
        told = f"no usage in the last {plural(int(span) if span == int(span) else span, 'day')}"
        console().print(told if is_recent else "no usage in this time")
    else:
        names = ("KEY", "MODEL") if by == "key-model" else (by.upper(),)
        shown = table(*names, *(f">{title.upper()}" for title in HEADER))
        for row in rows:
            shown.add_row(row.name, *([row.model] if by == "key-model" else []), *row.cells())
        console().print(shown)


def _from_gateway(gateway: GatewayClient, by: GroupBy, since: float, until: float) -> tuple[UsageRow, ...]:
    options = urlencode({"by": by, "since": f"{since:.0f}", "until": f"{until:.0f}"})
    response = ask(gateway, f"/fleet/usage?{options}")
    if not response["is_recorded"]:
        raise CommandError(
            f"the gateway at {gateway.url} records no usage",
            "it does so once it has keys: cortex keys add NAME --config cortex.toml",
            ExitCode.NOT_FOUND,
        )
    return msgspec.convert(response["rows"], tuple[UsageRow, ...])


def _from_ledger(config: Path, by: GroupBy, since: float, until: float) -> tuple[UsageRow, ...]:
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
        return read_usage(store, group=by, since=since, until=until, cost_of=catalogue.cost)
