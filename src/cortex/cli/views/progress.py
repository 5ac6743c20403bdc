"""Progress of work on models: bars on a terminal, a line per step elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


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
