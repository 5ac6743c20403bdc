"""Reads a call that is a JSON object, `{"name": "f", "arguments": {…}}`, and streams its arguments.

With the name first and an object for arguments, as nearly every model writes it, the call is announced at the
arguments' opening brace. From there on their text is streamed to the client and cannot be taken back. Arguments that
turn out not to be JSON stay what the model wrote: the client's parser rejects them, and they are never repaired into a
call that the model did not make. Every other shape (arguments first, wrapped, or as a string) is read whole. The object
may be an item of a list, whose brackets are layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from enum import Enum, auto
from typing import Final

from cortex.neuron.text.tools.call import NOTHING_YET, CallProgress, NotACall, call_from_json, tool_name
from cortex.neuron.text.tools.json_object import ObjectScanner

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
        """Responses that are JSON themselves should stream: gives up at the first key that no call has."""
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
