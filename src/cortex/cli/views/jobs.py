"""Jobs of the gateway, shown until they end. Ctrl-C cancels."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from typing import Any, Self

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cortex.cli.client import GatewayClient, GatewayRejected
from cortex.cli.failures import CommandError
from cortex.cli.output import PlainConsole, size
from cortex.wire.error_encoding import from_code
from cortex.wire.words import duration


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


def parse(value: Any) -> JobView:
    return msgspec.convert(value, JobView)


def follow(gateway: GatewayClient, started: Any) -> JobView:
    """Show the job until it has ended and return it. Ctrl-C cancels it. Raises CommandError when it failed."""
    job = parse(started)
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
            job = parse(gateway.get(f"/fleet/jobs/{job.id}"))
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
