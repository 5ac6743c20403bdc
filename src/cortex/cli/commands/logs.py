"""`cortex logs`: the latest requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import click
import msgspec
from rich.console import Console
from rich.text import Text

from cortex.cli.client import GatewayClient, GatewayUnreachable, gateway_options
from cortex.cli.failures import Command
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, json_option, print_json

POLL_S = 1.0
_TITLES = ("TIME", "STATUS", "TTFT", "TOTAL", "TOK/S", "TOKENS", "NODE", "KEY", "MODEL")


@click.command(cls=Command)
@click.option("-f", "--follow", is_flag=True, help="Wait for further requests until Ctrl-C.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many requests.")
@click.option("--model", type=MODEL, help="Only requests for this model; * matches any text.")
@click.option("--key", help="Only requests with the key of this name or id.")
@click.option("--status", help="Only requests with this status: 200, 5xx, ok, error.")
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

    TOKENS are those of the prompt, in parentheses how many of them were cached, and of the response, in parentheses how
    many of them were drafted. With --json one request per line when following.
    """
    filters = {name: value for name, value in (("model", model), ("key", key), ("status", status)) if value is not None}
    batches = _batches(gateway, limit, filters)
    first = next(batches)
    if as_json and not follow:
        print_json(first)
        return
    out = console()
    if not as_json and not first and not follow:
        out.print("no requests yet" if not filters else "no such requests")
        return
    lines = _Lines(out)
    if not as_json:
        lines.fit(map(_cells, first))
        lines.print(_TITLES, style="dim")
    _show(lines, first, as_json)
    while follow:
        time.sleep(POLL_S)
        _show(lines, next(batches), as_json)


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


def _show(lines: _Lines, requests: list[dict[str, Any]], as_json: bool) -> None:
    if not as_json:
        lines.fit(map(_cells, requests))
    for request in requests:
        if as_json:
            click.echo(msgspec.json.encode(request).decode())
        else:
            lines.print(_cells(request), style="red" if request["status"] >= 400 or request["error"] else "")


class _Lines:
    """Lines of aligned cells. A column grows with the requests that follow, and never shrinks."""

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
        f"{request['tokens_per_s']:.1f}" if request["tokens_per_s"] else "",
        tokens,
        request["node"] or "-",
        request["key"],
        f"{request['model']}{note}",
    )


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"
