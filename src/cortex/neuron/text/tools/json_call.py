"""Tool calls with JSON: objects between markers or bare, in lists, and arguments behind a name.

A bare object is a call only at the start of the response, and only if it names one of the request's tools; other JSON
is text. Models that write bare calls also write a list of Python calls. Behind a name, models leave out markers between
the name and the arguments, and the marker around all calls; instead of a name, the JSON object of a call may follow, or
a list of them. The arguments are streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from cortex.neuron.families.tool_calls import PYTHON_TAG, CallFrame, NamedForm
from cortex.neuron.text.stops import held_suffix
from cortex.neuron.text.tools.call import NOTHING_YET, CallProgress, CallReader, NotACall, call_from_json, tool_name
from cortex.neuron.text.tools.pythonic import PythonCallReader

_STRUCTURE: Final = re.compile(r'[{}"]')
_STRING_EVENT: Final = re.compile(r'["\\\x00-\x1f]')


class Scanned(NamedTuple):
    """The part of an object in a piece of text."""

    text: str
    """The text of the object. Raw line breaks that models write in strings are escaped."""
    end: int | None
    """Number of characters of the piece that belong to the object; None while the object continues."""


class ObjectScanner:
    """Scans an object from its opening brace on. Constant state, linear time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, *, depth: int = 0) -> Scanned:
        """Scans until only `depth` objects are open: 0 is the end of the outermost."""
        kept: list[str] = []
        taken = position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_STRING_EVENT if self._in_string else _STRUCTURE).search(text, position)
            if found is None:
                break
            position = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = True
                case "{":
                    self._depth += 1
                case "}":
                    self._depth -= 1
                    if self._depth == depth:
                        return Scanned("".join([*kept, text[taken:position]]), position)
                case control:
                    kept += [text[taken : found.start()], json.dumps(control)[1:-1]]
                    taken = position
        return Scanned("".join([*kept, text[taken:]]), None)


_MAX_HEAD_CHARACTERS: Final = 1024
"""A call whose arguments begin later than this is read whole, so that the search for them stays cheap."""
_HEAD: Final = re.compile(
    r'\{\s*(?:"(?:id|tool_call_id|type)"\s*:\s*"[^"\\]*"\s*,\s*){0,3}'
    r'"(?:name|tool_name)"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME_SO_FAR: Final = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)("?)')
_FIRST_KEY: Final = re.compile(r'\{\s*"([^"\\]*)"')
_UNDECIDED: Final = re.compile(r'\{\s*("[^"\\]*)?')
_CALL_KEYS: Final = frozenset(
    {"name", "tool_name", "function", "type", "id", "tool_call_id", "arguments", "parameters"}
)


class _Stage(Enum):
    HEAD = auto()
    """Before the arguments; or, in an unusual shape, anywhere in the object."""
    ARGUMENTS = auto()
    AFTER_ARGUMENTS = auto()
    """The object should end or continue with another member. Models also forget its closing brace."""
    MEMBERS = auto()
    """The rest of the object, which is ignored."""
    CLOSING = auto()
    """The object is complete: white space and the closing marker belong to the call."""


class JSONCallReader:
    """Owned by one call of one response."""

    def __init__(self, *, names: Collection[str] | None, closing: str, begun: str = "", in_list: bool = False) -> None:
        """`names`: the tools that make it a call, None: any. `closing`: the marker that may follow the object.
        `begun`: the part of the object that was already consumed. `in_list`: it is the next object of a list."""
        self._names = names
        self._closing = closing
        self._stage = _Stage.HEAD
        self._scanner = ObjectScanner()
        self._head = ""
        """The object's first characters, which decide whether it is a call."""
        self._object: list[str] = []
        """The object so far, for a call that is read whole."""
        self._tail = ""
        """White space, or the beginning of the closing marker."""
        self._is_bare = bool(begun) and not in_list
        self._in_list = in_list
        if begun:
            self._read_head(begun)

    def feed(self, text: str) -> CallProgress:
        match self._stage:
            case _Stage.HEAD:
                return self._read_head(text)
            case _Stage.ARGUMENTS:
                return self._read_arguments(text)
            case _Stage.AFTER_ARGUMENTS:
                return CallProgress(rest=self._leave_arguments(text))
            case _Stage.MEMBERS:
                return CallProgress(rest=self._skip_members(text))
            case _Stage.CLOSING:
                return CallProgress(rest=self._close(text))

    def finish(self) -> CallProgress:
        """An object whose closing marker was cut off, for example by a stop string, is still a complete call. A bare
        one that was cut off before its arguments is text unless it begins to name a tool."""
        if self._stage is _Stage.HEAD and self._is_bare and not self._may_name_a_tool():
            raise NotACall
        return NOTHING_YET if self._stage in (_Stage.HEAD, _Stage.ARGUMENTS) else CallProgress(rest="")

    def _may_name_a_tool(self) -> bool:
        found = _NAME_SO_FAR.match(self._head)
        if found is None or self._names is None:
            return False
        name, end = found.groups()
        return name in self._names if end else any(known.startswith(name) for known in self._names)

    def _read_head(self, text: str) -> CallProgress:
        if not self._head:
            text = text.lstrip()
            if text.startswith("[") and not self._in_list and not self._is_bare:
                self._in_list = True
                text = text[1:].lstrip()
            if not text:
                return NOTHING_YET
            if not text.startswith("{"):
                raise NotACall
        num_before = len(self._head)
        self._head = (self._head + text)[:_MAX_HEAD_CHARACTERS]
        if (found := _HEAD.match(self._head)) and (name := _spelled(found.group(1))):
            return self._announce(name, text, found.end() - num_before)
        scanned = self._scanner.feed(text)
        self._object.append(scanned.text)
        self._check_first_key()
        if scanned.end is None:
            return NOTHING_YET
        call = call_from_json("".join(self._object))
        self._check_name(call.name)
        self._stage = _Stage.CLOSING
        return CallProgress(call.name, call.arguments_json, self._close(text[scanned.end :]))

    def _announce(self, name: str, text: str, at: int) -> CallProgress:
        """The arguments begin at this character of `text`."""
        self._check_name(name)
        self._scanner.feed(text[:at])
        self._stage = _Stage.ARGUMENTS
        return replace(self._read_arguments(text[at:]), name=name)

    def _check_name(self, name: str) -> None:
        if self._names is not None and name not in self._names:
            raise NotACall

    def _check_first_key(self) -> None:
        """Responses that are JSON themselves should stream: gives up at the first key that calls do not have."""
        if found := _FIRST_KEY.match(self._head):
            if found.group(1) not in _CALL_KEYS:
                raise NotACall
        elif len(self._head) == _MAX_HEAD_CHARACTERS or not _UNDECIDED.fullmatch(self._head):
            raise NotACall

    def _read_arguments(self, text: str) -> CallProgress:
        scanned = self._scanner.feed(text, depth=1)
        if scanned.end is None:
            return CallProgress(arguments=scanned.text)
        self._stage = _Stage.AFTER_ARGUMENTS
        return CallProgress(arguments=scanned.text, rest=self._leave_arguments(text[scanned.end :]))

    def _leave_arguments(self, text: str) -> str | None:
        self._tail += text
        following = self._tail.lstrip()[:1]
        if not following:
            return None
        tail, self._tail = self._tail, ""
        if following in ",}":
            self._stage = _Stage.MEMBERS
            return self._skip_members(tail)
        self._stage = _Stage.CLOSING
        return self._close(tail)

    def _skip_members(self, text: str) -> str | None:
        end = self._scanner.feed(text).end
        if end is None:
            return None
        self._stage = _Stage.CLOSING
        return self._close(text[end:])

    def _close(self, text: str) -> str | None:
        """The text after the object, the end of its list and the closing marker."""
        self._tail += text
        following = self._tail.lstrip()
        rest = self._tail
        if following.startswith("]") and self._in_list:
            rest = following = following[1:].lstrip()
        if self._closing and following.startswith(self._closing):
            return following[len(self._closing) :]
        is_undecided = self._closing.startswith(following) if self._closing else not following and self._in_list
        return None if is_undecided else rest


def _spelled(name: str) -> str | None:
    """The value of a JSON string; None if it is not valid."""
    try:
        return tool_name(str(json.loads(name, strict=False)))
    except ValueError:
        return None


class MarkedJSON:
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, or a list of such objects between the markers."""

    bare_openings: tuple[str, ...] = ()
    next_openings: tuple[str, ...] = ("{",)
    separators = ","

    def __init__(self, frame: CallFrame, tool_names: Iterable[str]) -> None:
        self._frame = frame
        self._tool_names = frozenset(tool_names)
        self.openings: tuple[str, ...] = (frame.opening,)
        self.markers = frame.markers
        self.never_text = frame.markers if frame.is_control else ()

    def reader(self, opening: str) -> CallReader:
        if opening == self._frame.opening:
            return JSONCallReader(names=None, closing=self._frame.closing)
        return JSONCallReader(names=self._tool_names, closing=self._frame.closing, begun=opening, in_list=True)


class PlainJSON:
    """`{"name": "f", "parameters": {…}}`, or `[f(a=1), g()]`"""

    openings: tuple[str, ...] = ()
    separators = ";,"
    markers: tuple[str, ...] = ()
    never_text: tuple[str, ...] = ()

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: each tool's parameters by its name."""
        self._schemas = schemas
        self.next_openings = tuple(f"{name}(" for name in schemas)
        self.bare_openings = ("{", *(f"[{call}" for call in self.next_openings))

    def reader(self, opening: str) -> CallReader:
        if opening.endswith("("):
            return PythonCallReader("", self._schemas, opening.removeprefix("["))
        return JSONCallReader(names=self._schemas.keys(), closing="", begun=opening if opening == "{" else "")


class PythonTagJSON(PlainJSON):
    """Plain JSON, and `<|python_tag|>` begins a call anywhere."""

    openings: tuple[str, ...] = (PYTHON_TAG,)
    markers: tuple[str, ...] = (PYTHON_TAG,)
    never_text: tuple[str, ...] = (PYTHON_TAG,)


_MAX_NAME_CHARACTERS: Final = 512
_FENCE: Final = "```"


class NamedSyntax(MarkedJSON):
    def __init__(self, form: NamedForm, frame: CallFrame, tool_names: Iterable[str]) -> None:
        super().__init__(frame, tool_names)
        self._form = form
        self.openings = frame.openings
        self.markers = self.never_text = (*frame.markers, *self._form.separators)

    def reader(self, opening: str) -> CallReader:
        return _NamedReader(self._form, self._frame) if opening in self.openings else super().reader(opening)


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
        return _NamedReader(self._form, None, begun=opening)


class _NamedReader:
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
        found = self._form.head.fullmatch(head[:_MAX_NAME_CHARACTERS])
        if found is None or len(head) > _MAX_NAME_CHARACTERS:
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
        if len(head) > _MAX_NAME_CHARACTERS or re.search(r"\s", words):
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
