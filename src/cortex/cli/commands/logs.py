"""`cortex logs`: the latest requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import click
import msgspec
from rich.console import Console
from rich.text import Text

from cortex.cli.client import GatewayClient, GatewayUnreachable, gateway_options
from cortex.cli.failures import Command
from cortex.cli.output import console, json_option, print_json

POLL_S = 1.0
_COLUMNS = ((19, "TIME"), (6, "STATUS"), (7, "TTFT"), (8, "TOTAL"), (8, "TOK/S"), (14, "TOKENS"))


@click.command(cls=Command)
@click.option("-f", "--follow", is_flag=True, help="Wait for further requests until Ctrl-C.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many requests.")
@click.option("--model", help="Only of this model, or of a pattern with *.")
@click.option("--key", help="Only of the key with this name or id.")
@click.option("--status", help="Only with this status, such as 200 or 5xx, or: ok, error.")
@gateway_options
@json_option
def logs(
    follow: bool,
    limit: int,
    model: str | None,
    key: str | None,
    status: str | None,
    gateway: GatewayClient,
    as_json: bool,
) -> None:
    """Show the latest requests, oldest first.

    TOKENS are those of the prompt, in parentheses how many of them were cached, and of the response. With --json one
    request per line when following.
    """
    filters = {name: value for name, value in (("model", model), ("key", key), ("status", status)) if value is not None}
    batches = _batches(gateway, limit, filters)
    first = next(batches)
    if as_json and not follow:
        print_json(first)
        return
    out = console()
    if not as_json:
        if not first and not follow:
            out.print("no requests yet" if not filters else "no such requests")
            return
        _line(out, [name for _, name in _COLUMNS], "NODE", "KEY", "MODEL", style="dim")
    _show(out, first, as_json)
    while follow:
        time.sleep(POLL_S)
        _show(out, next(batches), as_json)


def _batches(gateway: GatewayClient, limit: int, filters: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    """The latest requests, then those since, oldest first. Waits for a gateway that restarts, which counts from zero
    again. Raises CommandError when the first call fails."""
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


def _show(out: Console, requests: list[dict[str, Any]], as_json: bool) -> None:
    for request in requests:
        if as_json:
            click.echo(msgspec.json.encode(request).decode())
        else:
            _request(out, request)


def _request(out: Console, request: dict[str, Any]) -> None:
    is_error = request["status"] >= 400 or request["error"]
    tokens = ""
    if request["prompt_tokens"] is not None:
        cached = f" ({request['cached_tokens']})" if request["cached_tokens"] else ""
        tokens = f"{request['prompt_tokens']}{cached} {request['completion_tokens']}"
    cells = [
        f"{datetime.fromtimestamp(request['time']):%Y-%m-%d %H:%M:%S}",
        str(request["status"]) if request["outcome"] != "client_disconnected" else "gone",
        _seconds(request["ttft_s"]),
        _seconds(request["duration_s"]),
        f"{request['tokens_per_s']:.1f}" if request["tokens_per_s"] else "",
        tokens,
    ]
    note = f"  {request['error']}" if request["error"] else ""
    _line(
        out, cells, request["node"] or "-", request["key"], f"{request['model']}{note}", style="red" if is_error else ""
    )


def _line(out: Console, cells: list[str], *rest: str, style: str) -> None:
    fixed = [cell.ljust(width) for cell, (width, _) in zip(cells, _COLUMNS, strict=True)]
    out.print(Text("  ".join([*fixed, *rest]), style=style), soft_wrap=True)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"
