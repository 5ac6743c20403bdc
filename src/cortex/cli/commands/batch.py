"""`cortex batch`: submit files of requests that can wait, and get their results."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import CommandError, ExitCode, Group
from cortex.cli.output import PlainConsole, console, json_option, print_json, table
from cortex.cli.views import ProgressView
from cortex.wire.words import os_error_in_words

POLL_S = 1.0
_MESSAGES = "msgbatch_"
_ENDED = ("completed", "failed", "expired", "cancelled")


class _FirstLine(msgspec.Struct):
    url: str | None = None


@click.group(cls=Group)
def batch() -> None:
    """Run files of requests on idle capacity."""


@batch.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--window", default="24h", show_default=True, help="How long it may take: 30m, 24h, 7d.")
@click.option("--wait", "waits", is_flag=True, help="Show progress until it ends.")
@gateway_options
@json_option
def submit(file: Path, window: str, waits: bool, gateway: GatewayClient, as_json: bool) -> None:
    """Submit a FILE with one request per line, as OpenAI's batches have them.

    \b
      {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
       "body": {"model": "qwen3", "messages": [{"role": "user", "content": "Hello"}]}}
    """
    endpoint = _endpoint(file)
    stored = gateway.upload("/v1/files", {"purpose": "batch"}, file)
    body = {"input_file_id": stored["id"], "endpoint": endpoint, "completion_window": window}
    made = gateway.post("/v1/batches", body)
    if waits:
        made = _wait(gateway, made)
    if as_json:
        print_json(made)
    elif waits:
        counts = made["request_counts"]
        console().print(f"{made['id']} is {made['status']}: {counts['completed']} done, {counts['failed']} failed")
        errors = " [--errors]" if counts["failed"] else ""
        console().print(f"get them with `cortex batch results {made['id']}{errors}`", style="dim", markup=False)
    else:
        console().print(made["id"])
    if made["status"] == "failed":
        problems = (made["errors"] or {}).get("data") or [{"message": "it has no valid line"}]
        raise CommandError(f"the batch failed: {problems[0]['message'].rstrip('.')}", "correct the file")


@batch.command(name="ls")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Number of batches.")
@gateway_options
@json_option
def ls(limit: int, gateway: GatewayClient, as_json: bool) -> None:
    """List the latest batches with their progress and cost.

    An operator's key lists those of all keys.
    """
    found: list[dict[str, Any]] = gateway.get(f"/fleet/batches?limit={limit}")["batches"]
    if as_json:
        print_json(found)
        return
    if not found:
        console().print("there are no batches; submit one with `cortex batch submit FILE`")
        return
    shown = table("BATCH", "KEY", "CREATED", "STATUS", ">DONE", ">FAILED", ">TOKENS", ">COST", "ENDPOINT")
    for each in found:
        shown.add_row(
            each["id"],
            each["key"],
            datetime.fromtimestamp(each["created_at"]).isoformat(" ", "minutes"),
            each["status"],
            f"{each['done']}/{each['lines']}",
            str(each["failed"]),
            f"{each['tokens']:,}",
            f"{each['cost']:,.4f}" if each["cost"] else "",
            each["endpoint"],
        )
    console().print(shown)


@batch.command()
@click.argument("id")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file.")
@click.option("--errors", is_flag=True, help="Get the failed lines instead of the successful ones.")
@gateway_options
def results(id: str, output: Path | None, errors: bool, gateway: GatewayClient) -> None:
    """Print the results of a batch, one JSON object per line."""
    if id.startswith(_MESSAGES):
        if errors:
            raise CommandError("a batch of messages has one file of results", "leave out --errors", ExitCode.USAGE)
        path = f"/v1/messages/batches/{quote(id, safe='')}/results"
    else:
        found = gateway.get(f"/v1/batches/{quote(id, safe='')}")
        file_id = found["error_file_id" if errors else "output_file_id"]
        if file_id is None:
            counts = found["request_counts"]
            what = "no line failed" if errors else "no line succeeded"
            if found["status"] not in _ENDED:
                what = f"{id} is {found['status']}: {counts['completed']} of {counts['total']} lines are done"
            remedy = "see `cortex batch ls`" if errors else "see `cortex batch ls`, or use --errors"
            raise CommandError(what, remedy, ExitCode.NOT_FOUND)
        path = f"/v1/files/{file_id}/content"
    if output is None:
        gateway.download(path, sys.stdout.buffer)
        return
    try:
        with output.open("wb") as out:
            gateway.download(path, out)
    except OSError as problem:
        raise CommandError(f"cannot write {output}: {problem.strerror}", "name another file") from problem


@batch.command()
@click.argument("id")
@gateway_options
def cancel(id: str, gateway: GatewayClient) -> None:
    """Cancel a batch. Completed lines keep their results."""
    kind = "messages/batches" if id.startswith(_MESSAGES) else "batches"
    found = gateway.post(f"/v1/{kind}/{quote(id, safe='')}/cancel")
    console().print(f"{id} is {found.get('status') or found['processing_status']}")


def _endpoint(file: Path) -> str:
    """The endpoint of the first line, which all lines must have."""
    try:
        with file.open("rb") as content:
            first = content.readline(1 << 24)
        found = msgspec.json.decode(first, type=_FirstLine).url
    except OSError as problem:
        raise CommandError(f"cannot read {os_error_in_words(problem)}", "name a file", ExitCode.USAGE) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if found is None:
        raise CommandError(
            f"the first line of {file} is not a request", "see `cortex batch submit --help`", ExitCode.USAGE
        )
    return found


def _wait(gateway: GatewayClient, made: dict[str, Any]) -> dict[str, Any]:
    with ProgressView(PlainConsole(stderr=True), [made["id"]]) as view:
        while made["status"] not in _ENDED:
            counts = made["request_counts"]
            total, done = counts["total"], counts["completed"] + counts["failed"]
            cost = f", cost {made['cost']:,.4f}" if made["cost"] else ""
            view.update(made["id"], f"{done}/{total} lines{cost}", done / total if total else None, made["status"])
            time.sleep(POLL_S)
            made = gateway.get(f"/v1/batches/{made['id']}")
    return made
