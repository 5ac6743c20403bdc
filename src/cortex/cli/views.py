"""Running jobs, loads and measurements, as the commands show them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Self

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from cortex.cli.client import GatewayClient, GatewayRejected
from cortex.cli.failures import CommandError
from cortex.cli.fleet_view import without_name
from cortex.cli.output import PlainConsole, size, table
from cortex.wire.error_encoding import from_code
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.protocol import ModelState, ModelStatus
from cortex.wire.words import duration, plural, replicas_in_words


class ProgressView:
    """Shows the latest progress of each model. A context manager; leaving it removes the bars."""

    def __init__(self, console: Console, models: Iterable[str]) -> None:
        self._console = console
        self._printed: dict[str, str] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[model]}", style="bold", markup=False),
            BarColumn(bar_width=28),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks = {model: self._progress.add_task("starting", total=None, model=model) for model in models}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._progress.stop()

    def update(self, model: str, description: str, fraction: float | None, step: str) -> None:
        """`fraction`: how much is done, 0 to 1; None when it is unknown. Models that are not shown are ignored."""
        if model not in self._tasks:
            return
        total = 1.0 if fraction is not None else None
        self._progress.update(self._tasks[model], description=description, total=total, completed=fraction or 0.0)
        if not self._console.is_terminal and self._printed.get(model) != step:
            self._printed[model] = step
            self._console.print(f"{model}: {step}", soft_wrap=True)


POLL_S = 0.25


class JobError(msgspec.Struct, frozen=True):
    code: str
    message: str


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as `/fleet/jobs` shows it. Unknown fields are ignored."""

    id: str
    kind: str
    model: str
    nodes: tuple[str, ...] = ()
    state: str
    stage: str = ""
    done_bytes: int | None = None
    total_bytes: int | None = None
    eta_s: float | None = None
    can_cancel: bool = False
    started_at: float = 0.0
    ended_at: float | None = None
    by: str = ""
    error: JobError | None = None

    @property
    def fraction(self) -> float | None:
        """0 to 1; None when it is unknown."""
        if self.done_bytes is None or not self.total_bytes:
            return None
        return min(1.0, self.done_bytes / self.total_bytes)

    def describe(self) -> str:
        """`download 42 %, 1.2 GiB of 2.9 GiB, 30 s left`"""
        parts = [self.stage]
        if self.fraction is not None and self.done_bytes is not None and self.total_bytes:
            parts = [f"{self.stage} {self.fraction:.0%}", f"{size(self.done_bytes)} of {size(self.total_bytes)}"]
        if self.eta_s is not None:
            parts.append(f"{duration(self.eta_s)} left")
        return ", ".join(parts)


def parse_job(value: Any) -> JobView:
    return msgspec.convert(value, JobView)


def follow(gateway: GatewayClient, started: Any) -> JobView:
    """Show the job until it has ended and return it. Ctrl-C cancels it. Raises CommandError when it failed."""
    job = parse_job(started)
    try:
        job = _show(gateway, job)
    except KeyboardInterrupt:
        _cancel(gateway, job)
        raise
    if job.state == "failed" and job.error is not None:
        error = from_code(job.error.code, job.error.message)
        raise GatewayRejected(error.status, error.code, error.message)
    if job.state != "done":
        raise CommandError(f"the {job.kind} of {job.model} was {job.state}", "run the command again to start it again")
    return job


def _show(gateway: GatewayClient, job: JobView) -> JobView:
    with ProgressView(PlainConsole(stderr=True), [job.model]) as view:  # the result alone is for pipes
        while job.state == "running":
            view.update(job.model, job.describe(), job.fraction, job.stage)
            time.sleep(POLL_S)
            job = parse_job(gateway.get(f"/fleet/jobs/{job.id}"))
    return job


def _cancel(gateway: GatewayClient, job: JobView) -> None:
    if not job.can_cancel:
        click.echo(f"the {job.kind} of {job.model} goes on; `cortex jobs` shows it", err=True)
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave the job running
    try:
        gateway.delete(f"/fleet/jobs/{job.id}")
    finally:
        signal.signal(signal.SIGINT, before)
    click.echo(f"the {job.kind} of {job.model} is cancelled", err=True)


def fraction_done(status: ModelStatus) -> float | None:
    """Progress of the present stage, 0 to 1; None when it is unknown."""
    progress = status.progress
    if progress is None or progress.total_bytes <= 0:
        return None
    return min(1.0, progress.done_bytes / progress.total_bytes)


def describe(status: ModelStatus) -> str:
    """State and progress: `loading: read 42%, 3 s left`, or `ready: 2 replicas on devices 0, 1`."""
    text = str(status.state)
    if status.state is ModelState.READY and (replicas := replicas_in_words(status.replica_devices)):
        text += f": {replicas}"
    if status.progress is not None and status.state in (ModelState.LOADING, ModelState.DOWNLOADING):
        text += f": {status.progress.finest_stage}"
        if (fraction := fraction_done(status)) is not None:
            text += f" {fraction:.0%}"
        if status.progress.eta_s is not None:
            text += f", {duration(status.progress.eta_s)} left"
    return text


def reason_of(status: ModelStatus) -> str:
    """The node's reason for a failure, without the model's id in front of it."""
    return without_name(status.id, status.reason or "the node gave no reason")


def memory_of(status: ModelStatus) -> str:
    """`23.6 GiB`, `~23.6 GiB` for an estimate, or the host memory of a model asleep; `22.1 GiB + 40.0 GiB in RAM` where
    a part of the weights is there."""
    if status.state is ModelState.ASLEEP:
        return f"{size(status.host_bytes)} in RAM"
    if status.measured_bytes is not None:
        return size(status.measured_bytes) + (f" + {size(status.host_bytes)} in RAM" if status.host_bytes else "")
    return f"~{size(status.estimate_bytes)}" if status.estimate_bytes is not None else ""


def context_of(status: ModelStatus) -> str:
    """`131,072`, or `4,480 of 131,072` where memory limits it."""
    tokens, full_tokens = status.context_tokens, status.full_context_tokens
    if not tokens:
        return ""
    return f"{tokens:,} of {full_tokens:,}" if full_tokens is not None and tokens < full_tokens else f"{tokens:,}"


def show_status(view: ProgressView, status: ModelStatus) -> None:
    stage = f" ({status.progress.finest_stage})" if status.progress else ""
    view.update(status.id, describe(status), fraction_done(status), f"{status.state}{stage}")


def parse_bench(value: Any) -> BenchResult | None:
    return None if value is None else msgspec.convert(value, BenchResult)


def show_bench(out: Console, result: BenchResult) -> None:
    rows = table("  MEASURED", ">SPEED", ">TIME", ">OF THE LIMIT")
    for each in result.streams:
        step = f"{each.streams / each.tokens_per_s * 1e3:.1f} ms a token" if each.tokens_per_s else ""
        rows.add_row(f"  {plural(each.streams, 'stream')}", _rate(each.tokens_per_s), step, _share(each.share))
    if result.prompt_tokens_per_s:
        taken = f"{result.prompt_tokens / result.prompt_tokens_per_s * 1e3:,.0f} ms"
        named = f"  prompt of {result.prompt_tokens:,} tokens"
        rows.add_row(named, _rate(result.prompt_tokens_per_s), taken, _share(result.prompt_share))
    for name, seconds in (("wake", result.wake_s), ("load", result.load_s)):
        if seconds is not None:
            rows.add_row(f"  {name}", "", duration(seconds) if seconds >= 10 else f"{seconds:.2f} s", "")
    out.print(rows)
    if result.bytes_per_s and result.flops:
        limit = f"  the limit, measured: {_scaled(result.bytes_per_s, 'B/s')} read, {_scaled(result.flops, 'FLOP/s')}"
        if result.host_bytes_per_s and result.bus_bytes_per_s:
            limit += f"; host memory {_scaled(result.host_bytes_per_s, 'B/s')}"
            limit += f", copied to the device at {_scaled(result.bus_bytes_per_s, 'B/s')}"
        out.print(Text(limit, style="dim"), soft_wrap=True)
    for note in result.notes:
        out.print(Text(f"  {note}", style="yellow"), soft_wrap=True)


def when_measured(result: BenchResult) -> str:
    return f"measured {datetime.fromtimestamp(result.measured_at):%Y-%m-%d %H:%M} with version {result.version}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tok/s" if tokens_per_s >= 100 else f"{tokens_per_s:,.1f} tok/s"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" if share >= 0.01 else "< 1%"


def _scaled(value: float, unit: str) -> str:
    """`4.21 TB/s`"""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
