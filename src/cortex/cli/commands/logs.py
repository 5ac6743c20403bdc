"""`cortex logs`: the latest requests, and the output of the servers that run models. `cortex usage`: requests, tokens
and their cost. `cortex audit`: who changed the fleet and its keys, and who signed in."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote, urlencode

import click
import msgspec
from rich.console import Console
from rich.text import Text

from cortex.cli.client import GatewayClient, GatewayUnreachable, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.ledger_source import ask, configuration, ledger
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, json_option, print_json, rate, table
from cortex.gateway.config import load
from cortex.gateway.configuration_files import load_catalogue
from cortex.gateway.ledger.store import GroupBy
from cortex.gateway.ledger.usage_report import HEADER, UsageRow, as_csv
from cortex.gateway.ledger.usage_report import usage as read_usage
from cortex.wire.words import plural

POLL_S = 1.0
_MOST_SHOWN = 1000
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TITLES = ("TIME", "STATUS", "TTFT", "TOTAL", "TOK/S", "TOKENS", "NODE", "KEY", "MODEL")


@click.command(cls=Command)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new requests until Ctrl-C.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, _MOST_SHOWN),
    default=20,
    show_default=True,
    help="Maximum number of entries.",
)
@click.option(
    "--model",
    type=MODEL,
    help="Only requests for this model; * matches any text. Also the output of the server that runs it.",
)
@click.option("--server", is_flag=True, help="Only the output of the server that runs --model.")
@click.option("--key", help="Only requests with the key of this name or id.")
@click.option("--status", help="Only requests with this status: 200, 5xx, ok, error.")
@click.option("--since", help="From the request log: 30m, 12h, 7d, a date, or a time.")
@gateway_options
@json_option
def logs(
    follow: bool,
    limit: int,
    model: str | None,
    server: bool,
    key: str | None,
    status: str | None,
    since: str | None,
    gateway: GatewayClient,
    as_json: bool,
) -> None:
    """Show the latest requests, oldest first.

    TOKENS shows prompt tokens (cached ones in parentheses) and response tokens (drafted ones in parentheses). With
    --json and --follow, prints one request per line. --since needs log_retention_days under [activity] of the gateway.

    Only operators see the output of a server (a harness with a command). Its last 500 lines are kept after it ends.
    With --json, only --server shows it.
    """
    if since is not None and follow:
        raise click.UsageError("--since shows past requests only: leave out --follow")
    output = None if model is None or "*" in model or (as_json and not server) else _ServerOutput(gateway, model, limit)
    if server:
        _show_output(output, follow=follow, as_json=as_json)
        return
    filters = {name: value for name, value in (("model", model), ("key", key), ("status", status)) if value is not None}
    batches = _batches(gateway, limit, filters)
    first = next(batches) if since is None else _logged(gateway, limit, filters, since)
    if as_json and not follow:
        print_json(first)
        return
    out = console()
    if output is not None and output.has_any():
        output.show(as_json=False)
        click.echo()
    if not as_json and not first and not follow:
        out.print("no requests yet" if not filters else "no matching requests")
        return
    lines = _Lines(out)
    if not as_json:
        lines.fit(map(_cells, first))
        lines.print(_TITLES, style="dim")
    _show(lines, first, as_json)
    if since is not None:
        _say_if_cut(len(first), limit)
    while follow:
        time.sleep(POLL_S)
        if output is not None:
            output.poll()
            output.show(as_json=False)
        _show(lines, next(batches), as_json)


def _logged(gateway: GatewayClient, limit: int, filters: dict[str, str], since: str) -> list[dict[str, Any]]:
    """Requests of the request log, oldest first. Raises CommandError."""
    options = urlencode({**filters, "limit": limit, "since": moment(since, time.time())})
    found: list[dict[str, Any]] = gateway.get(f"/fleet/activity?{options}")["requests"]
    return found[::-1]


def _say_if_cut(num_shown: int, limit: int) -> None:
    """Say that a period may have more entries than are shown."""
    if num_shown >= limit:
        click.echo(f"only the latest {num_shown} are shown: -n shows up to {_MOST_SHOWN}", err=True)


def moment(text: str, now: float, option: str = "--since") -> str:
    """A time for the gateway: `12h` before `now`, or the text itself, in the time zone of this machine."""
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS_S and number.isdecimal():
        return f"{now - int(number) * _UNITS_S[unit]:.0f}"
    try:
        return f"{datetime.fromisoformat(text).timestamp():.0f}"
    except (ValueError, OverflowError) as problem:
        raise click.BadParameter("use 30m, 12h, 7d, a date or a time", param_hint=option) from problem


class _ServerOutput:
    """The output lines of a model's servers, by node."""

    def __init__(self, gateway: GatewayClient, model: str, limit: int) -> None:
        self._gateway = gateway
        self._path = f"/fleet/models/{quote(model)}/log"
        self._limit = limit
        self._next: dict[str, int] = {}
        self._new: list[tuple[str, str]] = []
        self.problem: CommandError | None = None
        """Why there is no output: the model has no server, or the key is not an operator's."""
        try:
            self._add(self._gateway.get(self._path))
        except CommandError as error:
            self.problem = error

    def has_any(self) -> bool:
        return bool(self._new)

    def poll(self) -> None:
        """Fetch new lines. Retried later while the gateway restarts."""
        for node, after in self._next.items():
            with contextlib.suppress(CommandError):
                self._add(self._gateway.get(f"{self._path}?{urlencode({'node': node, 'after': after})}"))

    def show(self, *, as_json: bool) -> None:
        for node, line in self._new:
            click.echo(msgspec.json.encode({"node": node, "line": line}) if as_json else f"{node} | {line}")
        self._new.clear()

    def _add(self, page: dict[str, Any]) -> None:
        for each in page["nodes"]:
            lines = each["lines"] if each["node"] in self._next else each["lines"][-self._limit :]
            self._next[each["node"]] = each["next"]
            self._new += [(each["node"], line) for line in lines]


def _show_output(output: _ServerOutput | None, *, follow: bool, as_json: bool) -> None:
    if output is None:
        raise click.UsageError("--server needs --model with the name of one model.")
    if output.problem is not None:
        raise output.problem
    if not output.has_any() and not follow and not as_json:
        click.echo("no output yet")
    output.show(as_json=as_json)
    while follow:
        time.sleep(POLL_S)
        output.poll()
        output.show(as_json=as_json)


def _batches(gateway: GatewayClient, limit: int, filters: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    """The latest requests, then new ones, oldest first. Waits while the gateway restarts, after which numbers begin at
    zero again. Raises CommandError if the first call fails."""
    after, is_first, is_lost = 0, True, False
    while True:
        try:
            page = gateway.get(f"/fleet/activity?{urlencode({**filters, 'limit': limit, 'after': after})}")
        except GatewayUnreachable as error:
            if is_first:
                raise
            if not is_lost:
                click.echo(f"cortex: {error.message}; waiting for it", err=True)
            is_lost = True
            yield []
            continue
        is_first = is_lost = False
        if page["next"] < after:
            after = 0
            continue
        after, limit = page["next"], 1000
        yield page["requests"][::-1]


def _show(lines: _Lines, requests: list[dict[str, Any]], as_json: bool) -> None:
    if not as_json:
        lines.fit(map(_cells, requests))
    for request in requests:
        if as_json:
            click.echo(msgspec.json.encode(request).decode())
        else:
            lines.print(_cells(request), style="red" if request["status"] >= 400 or request["error"] else "")


class _Lines:
    """Lines of aligned cells. Columns may grow with later requests and never shrink."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._widths = [len(title) for title in _TITLES]

    def fit(self, rows: Iterable[Sequence[str]]) -> None:
        for row in rows:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]

    def print(self, cells: Sequence[str], style: str) -> None:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True))
        self._out.print(Text(line.rstrip(), style=style), soft_wrap=True)


def _cells(request: dict[str, Any]) -> tuple[str, ...]:
    """A request under `_TITLES`."""
    tokens = ""
    if request["prompt_tokens"] is not None:
        cached = f" ({request['cached_tokens']})" if request["cached_tokens"] else ""
        drafted = f" ({request['accepted_draft_tokens']})" if request.get("accepted_draft_tokens") else ""
        tokens = f"{request['prompt_tokens']}{cached} {request['completion_tokens']}{drafted}"
    note = f"  {request['error']}" if request["error"] else ""
    return (
        f"{datetime.fromtimestamp(request['time']):%Y-%m-%d %H:%M:%S}",
        str(request["status"]) if request["outcome"] != "client_disconnected" else "gone",
        _seconds(request["ttft_s"]),
        _seconds(request["duration_s"]),
        rate(request["tokens_per_s"]),
        tokens,
        request["node"] or "-",
        request["key"],
        f"{request['model']}{note}",
    )


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


@click.command(cls=Command)
@click.option(
    "-n", "--limit", type=click.IntRange(1, _MOST_SHOWN), default=20, show_default=True, help="Number of actions."
)
@click.option("--key", help="Only actions of the key with this name or id.")
@click.option("--since", help="Start of the period: 30m, 12h, 7d, a date, or a time.")
@gateway_options
@json_option
def audit(limit: int, key: str | None, since: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """Show who changed models, nodes and keys, or signed in.

    The oldest action comes first; STATUS is its outcome.

    Needs an operator's key. Includes rejected requests of valid keys and failed sign-ins. Changes of keys in the
    configuration file have no client. The log is kept for audit_days under [ledger] of the gateway.
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
        console().print("no changes and no sign-ins")
        return
    shown = table("TIME", "KEY", "CLIENT", ">STATUS", "ACTION", "DETAIL")
    for entry in entries:
        at = datetime.fromtimestamp(entry["at"]).isoformat(" ", "seconds")
        shown.add_row(
            at, entry["key_name"], entry["client"], str(entry["status"] or ""), entry["action"], entry["detail"]
        )
    console().print(shown)
    if since is not None:
        _say_if_cut(len(entries), limit)


DAY_S = 86400
_GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)


@click.command(cls=Command)
@click.option("--by", type=click.Choice(_GROUPS), default="key", show_default=True)
@click.option("--days", type=click.FloatRange(0, min_open=True), help="Days to look back. [default: 30]")
@click.option("--since", help="Start of the period: 12h, 7d, a date, or a time.")
@click.option("--until", help="End of the period: 12h, 7d, a date, or a time. [default: now]")
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
    database is read directly, and the gateway may be running. Otherwise the gateway reports it: all usage for an
    operator's key, its own for any other key.
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
        note = f"no usage in the last {plural(int(span) if span == int(span) else span, 'day')}"
        console().print(note if is_recent else "no usage in this time")
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
    location = loaded.database(config.parent)
    catalogue = load_catalogue(loaded, config)
    if "://" not in location and not Path(location).exists():
        raise CommandError(
            f"there is no ledger at {location}",
            "it is made once there are keys; if the gateway's state is elsewhere, set gateway.state in the file or "
            "CORTEX_GATEWAY__STATE here too",
            ExitCode.NOT_FOUND,
        )
    with ledger(location) as database:
        return read_usage(database, group=by, since=since, until=until, cost_of=catalogue.cost)
