"""Harmony, in which gpt-oss writes: a response is a sequence of messages, each with a header and a body.

`<|channel|>analysis<|message|>…<|end|>`, then for example
`<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`.

The channel `analysis` is reasoning, `commentary` and `final` are text. A message to a function is a call of it; the
recipient is in the role or in the channel. Messages to tools that the model was trained with and the client does not
have (`python`, `browser.search`) are not calls but part of the reasoning. Missing and repeated parts are tolerated, and
no marker is ever text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Final

from cortex.neuron.text.output.parser import OutputEvent
from cortex.neuron.text.stops import held_suffix
from cortex.neuron.text.tools.call import NotACall, tool_name
from cortex.neuron.text.tools.json_call import ObjectScanner
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, ToolCallStop

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
CONSTRAIN: Final = "<|constrain|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
MARKERS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
FUNCTIONS: Final = "functions."
"""Prefix of the names of a client's tools."""
REASONING_END: Final = f"{END}{START}assistant"

_MARKER: Final = re.compile("|".join(map(re.escape, MARKERS)))
_MAX_HEADER_CHARACTERS: Final = 512
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)?")
_ROLE: Final = re.compile(r"\s*([\w.-]*)")
_BEGUN_RECIPIENT: Final = r"(?:t|to|to=\S*)?\s*"
_BEGUN_AFTER_ROLE: Final = re.compile(rf"\s*{_BEGUN_RECIPIENT}")
_BEGUN: Final = re.compile(rf"\s*[\w.-]*(?:\s+{_BEGUN_RECIPIENT})?")
_BEGUN_LINES: Final = re.compile(
    r"(?:\s*<\|(?:channel|constrain)\|>\s*[\w.-]*|\s+(?:to=[^\s<]*|to?|j(?:s(?:on?)?)?|c(?:o(?:de?)?)?))*\s*"
)
"""A header of several lines from its first marker on, maybe incomplete: only what belongs in one."""


class _Part(Enum):
    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    CALL = auto()
    """The body of a call, before its arguments or in them."""
    DROPPED = auto()
    """The rest of a call's body after its arguments, or the message of another role."""


class HarmonyParser:
    """Parses one choice of a response. Owned by one request. The joined events do not depend on how text was split."""

    def __init__(
        self, tool_names: Iterable[str] | None, new_id: Callable[[], str], index: int, opened: str = "assistant"
    ) -> None:
        """`tool_names`: None to ignore calls. `opened`: the text of the prompt after its last `<|start|>`."""
        self._tool_names = None if tool_names is None else frozenset(tool_names)
        self._new_id = new_id
        self._index = index
        self._held = ""
        """Text that may begin a marker."""
        self._part = _Part.HEADER
        self._header = ""
        self._has_role = False
        """Whether the role is known to be the assistant's, and not part of the header."""
        self._space = ""
        """White space that is layout if the message ends."""
        self._begun: set[_Part] = set()
        """The parts that have text: another message of a part is separated from it."""
        self._is_apart = False
        self._name = ""
        self._arguments: ObjectScanner | None = None
        self._num_calls = 0
        self._events: list[OutputEvent] = []
        self.is_over = False
        """Whether the response has begun, so that the reasoning is over."""
        self.broke_off = False
        """After `finish`: whether the response ended inside a call."""
        role = _ROLE.match(opened)
        if role is not None and role[1] == "assistant":
            self._has_role, opened = True, opened[role.end() :]
        self.push(opened)
        self._space = ""

    @property
    def is_thinking(self) -> bool:
        return self._part is _Part.REASONING

    def push(self, text: str) -> list[OutputEvent]:
        self._held += text
        if "<" not in self._held:  # with which every marker begins
            self._take(self._held)
            self._held = ""
            return self._flushed()
        while (marker := _MARKER.search(self._held)) is not None:
            self._take(self._held[: marker.start()])
            self._held = self._held[marker.end() :]
            self._mark(marker[0])
        clear = len(self._held) - max(held_suffix(self._held, marker) for marker in MARKERS)
        self._take(self._held[:clear])
        self._held = self._held[clear:]
        return self._flushed()

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """The events of held-back text, after the last push. `is_cut`: a limit ended the response, not the model."""
        if not is_cut:
            self._take(self._held)
            if self._part is _Part.HEADER and _RECIPIENT.search(self._header):
                self._open()
            elif self._part is _Part.HEADER and CHANNEL not in self._header:
                self._give_up_header()
        if self._part in (_Part.REASONING, _Part.TEXT) and not self._is_apart:
            self._emit(self._space)
        if self._part is _Part.CALL:
            self._end_call(is_cut=is_cut)
        self._held = self._space = ""
        return self._flushed()

    def _flushed(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def _mark(self, marker: str) -> None:
        if self._part is _Part.HEADER and marker in (CHANNEL, CONSTRAIN):
            self._header += marker
        elif self._part is _Part.HEADER and marker == MESSAGE:
            self._open()
        elif marker not in (CONSTRAIN, MESSAGE):  # in a body, these two are dropped
            if self._part is _Part.HEADER and _RECIPIENT.search(self._header):
                self._open()
            self._close()
            if marker == CHANNEL:
                self._has_role, self._header = True, marker

    def _close(self) -> None:
        """Ends a message. The header of the next follows."""
        if self._part is _Part.CALL:
            self._end_call(is_cut=False)
        self._part, self._header, self._has_role, self._space = _Part.HEADER, "", False, ""

    def _open(self) -> None:
        """Begins the body of a message, from its header."""
        header = self._header
        role = "assistant" if self._has_role else _ROLE.match(header)[1]  # type: ignore[index]  # it always matches
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        self._begin(_Part.TEXT)
        if role and not role.startswith("assistant"):
            self._part = _Part.DROPPED
        elif recipient is not None and recipient[1] not in ("user", "assistant", "all"):
            self._address(recipient[1])
        elif channel is not None and channel[1] == "analysis":
            self._begin(_Part.REASONING)
        self.is_over = self.is_over or self._part in (_Part.TEXT, _Part.CALL)

    def _begin(self, part: _Part) -> None:
        self._part, self._header, self._is_apart = part, "", part in self._begun

    def _address(self, recipient: str) -> None:
        """A message to a tool: to one of the client's, or else to one that the model was trained with."""
        is_function = recipient.startswith(FUNCTIONS)
        name = recipient.removeprefix(FUNCTIONS)
        if not is_function and self._tool_names is not None:
            name = next((each for each in (name, name.rpartition(".")[2]) if each in self._tool_names), "")
        try:
            self._name = tool_name(name) if is_function or (name and self._tool_names is not None) else ""
        except NotACall:
            self._name = ""
        if not self._name:
            self._begin(_Part.TEXT if is_function else _Part.REASONING)
        elif self._tool_names is not None:
            self._begin(_Part.CALL)
            self._arguments = None

    def _take(self, text: str) -> None:
        """Text without markers."""
        if not text:
            return
        match self._part:
            case _Part.HEADER:
                self._header += text
                if not self._may_be_header():
                    self._give_up_header()
            case _Part.REASONING | _Part.TEXT:
                text = self._space + text
                solid = text.rstrip()
                self._space = text[len(solid) :]
                self._emit(solid)
            case _Part.CALL:
                self._read_arguments(text)
            case _Part.DROPPED:
                pass

    def _may_be_header(self) -> bool:
        before, marker, _ = self._header.partition("<|")
        begun = (_BEGUN_AFTER_ROLE if self._has_role else _BEGUN).fullmatch(before)
        if begun is None or len(self._header) > _MAX_HEADER_CHARACTERS:
            return False
        has_lines = bool(marker) and "\n" in self._header
        return not has_lines or _BEGUN_LINES.fullmatch(self._header, len(before)) is not None

    def _give_up_header(self) -> None:
        """Text that is not a header belongs to a message without one, or to its channel."""
        channel = _CHANNEL_NAME.search(self._header)
        text = self._header[channel.end() :] if channel is not None else self._header
        if channel is None and not self._has_role:
            text = re.sub(r"^\s*assistant\b", "", text)
        self._begin(_Part.REASONING if channel is not None and channel[1] == "analysis" else _Part.TEXT)
        self.is_over = self.is_over or self._part is _Part.TEXT
        self._take(_MARKER.sub("", text))

    def _read_arguments(self, text: str) -> None:
        if self._arguments is None:
            text = text.lstrip()
            if not text:
                return
            if not text.startswith("{"):
                self._begin(_Part.TEXT)
                self._take(text)
                return
            self._start_call()
            self._arguments = ObjectScanner()
        scanned = self._arguments.feed(text)
        if scanned.text:
            self._events.append(ToolCallDelta(index=self._index, call=self._num_calls, arguments=scanned.text))
        if scanned.end is not None:
            self._stop_call(is_complete=True)

    def _end_call(self, *, is_cut: bool) -> None:
        """At the end of a message whose arguments are not complete. A call without a body has no arguments."""
        if self._arguments is not None:
            self._stop_call(is_complete=False)
        elif is_cut:
            self.broke_off = True
        else:
            self._start_call()
            self._events.append(ToolCallDelta(index=self._index, call=self._num_calls, arguments="{}"))
            self._stop_call(is_complete=True)

    def _start_call(self) -> None:
        call = ToolCallStart(index=self._index, call=self._num_calls, id=self._new_id(), name=self._name)
        self._events.append(call)

    def _stop_call(self, *, is_complete: bool) -> None:
        self._events.append(ToolCallStop(index=self._index, call=self._num_calls, is_complete=is_complete))
        self._num_calls += 1
        self._arguments, self._part, self.broke_off = None, _Part.DROPPED, not is_complete

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._is_apart:
            text = f"\n\n{text.lstrip()}"
            self._is_apart = False
        self._begun.add(self._part)
        self.broke_off = False
        if self._part is _Part.REASONING:
            self._events.append(ReasoningDelta(index=self._index, text=text))
        else:
            self._events.append(TextDelta(index=self._index, text=text))
