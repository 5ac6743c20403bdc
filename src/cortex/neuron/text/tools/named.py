"""Calls whose name comes before JSON arguments, between control tokens: `[TOOL_CALLS]f[ARGS]{…}` and the like.

Models leave out markers between the name and the arguments, and the marker around all calls. Instead of a name, the
JSON object of a call may follow, or a list of them. The arguments are streamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from cortex.neuron.families.tool_calls import CallFrame, NamedForm
from cortex.neuron.text.output.stops import held_suffix
from cortex.neuron.text.tools.call import NOTHING_YET, CallProgress, CallReader, NotACall, tool_name
from cortex.neuron.text.tools.json_call import JSONCallReader
from cortex.neuron.text.tools.json_object import ObjectScanner
from cortex.neuron.text.tools.json_syntax import MarkedJSON

_MAX_HEAD_CHARACTERS: Final = 512
_FENCE: Final = "```"


class NamedSyntax(MarkedJSON):
    def __init__(self, form: NamedForm, frame: CallFrame, tool_names: Iterable[str]) -> None:
        super().__init__(frame, tool_names)
        self._form = form
        self.openings = frame.openings
        self.markers = self.never_text = (*frame.markers, *self._form.separators)

    def reader(self, opening: str) -> CallReader:
        return _Reader(self._form, self._frame) if opening in self.openings else super().reader(opening)


class NameLine:
    """`f` in a line of its own and JSON after it, at the start of the response."""

    openings: tuple[str, ...] = ()
    next_openings: tuple[str, ...] = ()
    separators = ""
    markers: tuple[str, ...] = ()
    never_text: tuple[str, ...] = ()

    def __init__(self, form: NamedForm, tool_names: Iterable[str]) -> None:
        self._form = form
        self.bare_openings = tuple(f"{name}\n" for name in tool_names)

    def reader(self, opening: str) -> CallReader:
        return _Reader(self._form, None, begun=opening)


class _Reader:
    """Owned by one call of one response."""

    def __init__(self, form: NamedForm, frame: CallFrame | None, *, begun: str = "") -> None:
        """`begun`: the beginning of the head, which was already consumed."""
        self._form = form
        self._frame = frame
        fence = _FENCE if _FENCE in form.head.pattern else ""
        self._closings = () if frame is None else tuple(filter(None, (fence, frame.closing)))
        """What may follow the arguments."""
        self._markers = (*form.separators, _FENCE + "json", _FENCE, *(frame.markers if frame else ()))
        self._json_reader: CallReader | None = None
        self._head: str | None = begun
        """What precedes the arguments; None once they have begun."""
        self._scanner = ObjectScanner()
        self._tail: str | None = None
        """What follows the arguments, once they are complete."""

    def feed(self, text: str) -> CallProgress:
        if self._json_reader is not None:
            return self._json_reader.feed(text)
        if self._tail is not None:
            return CallProgress(rest=self._close(text))
        if self._head is None:
            return self._read_arguments(text)
        self._head += text
        if self._frame is not None and self._head.lstrip().startswith(("[", "{")):
            self._json_reader = JSONCallReader(names=None, closing=self._frame.closing)
            return self._json_reader.feed(self._head)
        head, brace, arguments = self._head.partition("{")
        if not brace:
            self._check_beginning(head)
            return NOTHING_YET
        found = self._form.head.fullmatch(head[:_MAX_HEAD_CHARACTERS])
        if found is None or len(head) > _MAX_HEAD_CHARACTERS:
            raise NotACall
        self._head = None
        progress = self._read_arguments(brace + arguments)
        return CallProgress(tool_name(found["name"]), progress.arguments, progress.rest)

    def finish(self) -> CallProgress:
        if self._json_reader is not None:
            return self._json_reader.finish()
        return NOTHING_YET if self._tail is None else CallProgress(rest="")

    def _check_beginning(self, head: str) -> None:
        """A head is one word between markers: gives up at the second, so that text streams."""
        held = max((held_suffix(head, marker) for marker in self._markers), default=0)
        for marker in self._markers:
            head = head.replace(marker, "\0")
        words = re.sub(r"\s*\0\s*", "\0", head[: len(head) - held].strip())
        if len(head) > _MAX_HEAD_CHARACTERS or re.search(r"\s", words):
            raise NotACall

    def _read_arguments(self, text: str) -> CallProgress:
        scanned = self._scanner.feed(text)
        if scanned.end is None:
            return CallProgress(arguments=scanned.text)
        self._tail = ""
        return CallProgress(arguments=scanned.text, rest=self._close(text[scanned.end :]))

    def _close(self, text: str) -> str | None:
        """The text after the closing markers; None until it is certain that there are none."""
        assert self._tail is not None, "the arguments are complete"
        self._tail += text
        rest = self._tail
        for closing in self._closings:
            following = rest.lstrip()
            if following.startswith(closing):
                rest = following[len(closing) :]
            elif closing.startswith(following):
                return None
        return rest
