"""`cortex usage`: requests, tokens and their cost from the gateway's ledger."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Literal

import click

from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.output import console, counted, json_option, print_json, table
from cortex.gateway.api.usage import cost_of
from cortex.gateway.config import load
from cortex.gateway.configuration_files import load_catalogue
from cortex.gateway.database import StoreError
from cortex.gateway.ledger.store import open_store
from cortex.gateway.ledger.usage_report import HEADER
from cortex.gateway.ledger.usage_report import usage as read_usage

DAY_S = 86400


@click.command(cls=Command)
@click.option("--by", type=click.Choice(["key", "model", "node", "day"]), default="key", show_default=True)
@click.option("--days", type=click.FloatRange(0, min_open=True), default=30, show_default=True, help="How far back.")
@click.option("-c", "--config", type=click.Path(path_type=Path), help="The gateway's cortex.toml.")
@json_option
def usage(by: Literal["key", "model", "node", "day"], days: float, config: Path | None, as_json: bool) -> None:
    """Show tokens and cost by key, model, node or day.

    The cost follows from the prices in models.toml. Reads the ledger database directly; the gateway may be running.
    """
    loaded = load(config, os.environ)
    database = loaded.database(config.parent if config else Path.cwd())
    catalogue = load_catalogue(loaded, config)
    if "://" not in database and not Path(database).exists():
        raise CommandError(
            f"there is no ledger at {database}",
            "name the gateway's configuration with --config; a ledger is kept only when keys are configured",
            ExitCode.NOT_FOUND,
        )
    now = time.time()
    try:
        store = open_store(database)
        rows = read_usage(
            store, group=by, since=now - days * DAY_S, until=now + 60, cost_of=partial(cost_of, catalogue)
        )
        store.close()
    except StoreError as error:
        raise CommandError(str(error), "check [ledger] database in cortex.toml", ExitCode.UNREACHABLE) from error
    if as_json:
        print_json(rows)
        return
    if not rows:
        console().print(f"no usage in the last {counted(days, 'day')}")
        return
    shown = table(by.upper(), *(f">{title.upper()}" for title in HEADER))
    for row in rows:
        shown.add_row(row.name, *row.cells())
    console().print(shown)
