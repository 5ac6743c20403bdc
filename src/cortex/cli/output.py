"""Output of commands: JSON for scripts, tables for people."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import click
import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PADDING = re.compile(r" +\n")
_PIPE_WIDTH = 10_000
"""Line width when not writing to a terminal, so that nothing is wrapped or cut. Trailing spaces are removed."""

STATE_STYLES = {
    "ready": "green",
    "loading": "yellow",
    "downloading": "yellow",
    "recovering": "yellow",
    "unloading": "yellow",
    "asleep": "cyan",
    "failed": "red",
    "unreachable": "red",
    "suspended": "blue",
    "cold": "dim",
}


class _WithoutPadding:
    """A text stream that ends its lines without the spaces that fill up tables."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_PADDING.sub("\n", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def for_terminal(text: str) -> str:
    """Text of models, clients and nodes without control characters, which could control the terminal."""
    return _CONTROLS.sub("", text)


class PlainConsole(Console):
    """Shows text literally: brackets, such as `[[models]]`, are not markup. A terminal gets no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control or not self.is_terminal else for_terminal(text), style, control)


def console() -> Console:
    """Standard output; wide and without padding when it is not a terminal, so that pipes get whole lines."""
    out = PlainConsole()
    if out.is_terminal:
        return out
    whole_lines = cast("IO[str]", _WithoutPadding(sys.stdout))
    return PlainConsole(file=whole_lines, width=_PIPE_WIDTH)


def file_here(name: str) -> Path | None:
    """The configuration in the working directory, if there is one. Prints its path, because the user did not name
    it."""
    path = Path(name)
    if not path.is_file():
        return None
    click.echo(f"using {path.resolve()}; name another one with --config", err=True)
    return path


def print_json(value: Any) -> None:
    """One indented JSON document on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def say(line: str) -> None:
    """One line, which the terminal may wrap."""
    console().print(line, soft_wrap=True)


def answer(value: Any, line: str, *, as_json: bool) -> None:
    """The result of a command: `value` for scripts, or a line for people."""
    if as_json:
        print_json(value)
    else:
        say(line)


def table(*columns: str) -> Table:
    """A table without rules; columns that start with `>` are right-aligned."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return made


def state(name: str) -> Text:
    return Text(name, style=STATE_STYLES.get(name.split(":")[0], ""))


def size(num_bytes: float) -> str:
    """Bytes for people: `98 MiB`, `23.6 GiB`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{value:.0f} {unit}" if value >= 100 or scale <= 1 << 20 else f"{value:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def rate(per_s: float | None) -> str:
    """Tokens per second for people: `16.1`, `247`; nothing for none."""
    return "" if not per_s else f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def bar(fraction: float, width: int = 20, style: str = "") -> Text:
    """`██████▌             `: a fraction, drawn to an eighth of a character."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    chosen = style or ("red" if fraction > 0.95 else "yellow" if fraction > 0.8 else "green")
    return Text(drawn.ljust(width), style=f"{chosen} on grey23")
