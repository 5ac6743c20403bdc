"""Progress of models that load: bars on a terminal, a line per step elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cortex.wire.node import ModelState, ModelStatus


def fraction_done(status: ModelStatus) -> float | None:
    """Progress of the present stage, 0 to 1; None when it is unknown."""
    progress = status.progress
    if progress is None or progress.total_bytes <= 0:
        return None
    return min(1.0, progress.done_bytes / progress.total_bytes)


def describe(status: ModelStatus) -> str:
    """State and progress: `loading: read 42%, 3 s left`."""
    text = str(status.state)
    if status.progress is not None and status.state in (ModelState.LOADING, ModelState.DOWNLOADING):
        text += f": {status.progress.stage}"
        if (fraction := fraction_done(status)) is not None:
            text += f" {fraction:.0%}"
        if status.progress.eta_s is not None:
            text += f", {status.progress.eta_s:.0f} s left"
    return text


def reason_of(status: ModelStatus) -> str:
    """The node's reason for a failure, without the model's id in front of it."""
    return (status.reason or "the node gave no reason").removeprefix(f"{status.id}: ")


class LoadView:
    """Shows the latest status of each model. A context manager; leaving it removes the bars."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, str] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[model]}", style="bold"),
            BarColumn(bar_width=28),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._progress.stop()

    def starting(self, models: Iterable[str]) -> None:
        """Show the requested models before any status is known."""
        for model in models:
            self._tasks[model] = self._progress.add_task("starting", total=None, model=model)

    def update(self, status: ModelStatus) -> None:
        task = self._tasks.get(status.id)
        if task is None:
            return
        fraction = fraction_done(status)
        self._progress.update(
            task,
            description=describe(status),
            total=1.0 if fraction is not None else None,
            completed=fraction or 0.0,
        )
        stage = status.progress.stage if status.progress else ""
        step = f"{status.id}: {status.state}{f' ({stage})' if stage else ''}"
        if not self._console.is_terminal and self._printed.get(status.id) != step:
            self._printed[status.id] = step
            self._console.print(step, highlight=False, markup=False)
