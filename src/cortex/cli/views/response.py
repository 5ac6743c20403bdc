"""A response in the terminal while it arrives: a notice until it begins, then Markdown, block by block."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

FENCES = ("```", "~~~")


def complete_blocks(text: str) -> tuple[str, str]:
    """The leading Markdown blocks of `text` that no further text can change, and the rest.

    Blocks end at a blank line outside of a code fence. A list may continue after one: its items are then separate
    lists, which look the same.
    """
    end, position, fence = 0, 0, None
    for line in text.splitlines(keepends=True):
        position += len(line)
        stripped = line.strip()
        if fence is not None:
            if stripped.startswith(fence):
                fence = None
        elif stripped.startswith(FENCES):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n"):
            end = position
    return text[:end], text[end:]


class ResponseView:
    """Shows a response on `console`. A context manager: what is left is shown at the end, also after Ctrl-C.

    On a terminal, finished blocks are rendered. Elsewhere the text is printed as it is.
    """

    def __init__(self, console: Console, notice: str) -> None:
        self._console = console
        self._status = console.status(Text(notice, style="dim")) if console.is_terminal else None
        self._pending = ""
        self._ends_open = False
        """The last thing printed was not a whole line."""

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()
        self._print_blocks(self._pending)
        if self._status is not None:
            self._status.stop()

    def show(self, text: str, *, is_reasoning: bool) -> None:
        """Add to the response."""
        if self._status is None:
            self._print(text, None)
        elif is_reasoning:
            self._status.stop()
            self._print(text, "dim")
        else:
            self._end_line()
            blocks, self._pending = complete_blocks(self._pending + text)
            self._print_blocks(blocks)
            self._status.update(Text(self._pending.strip().rpartition("\n")[2][-60:], style="dim"))
            self._status.start()

    def _print_blocks(self, text: str) -> None:
        if text.strip():
            self._console.print(Markdown(text))

    def _print(self, text: str, style: str | None) -> None:
        self._console.print(text, end="", soft_wrap=True, style=style)
        self._ends_open = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._ends_open:
            self._console.print()
            self._ends_open = False
