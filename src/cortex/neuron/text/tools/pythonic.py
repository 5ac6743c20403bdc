"""Calls as Python writes them: `<|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>` of LFM2, and
`<function_calls>f(a=1)</function_calls>` of OLMo, with one call per line.

A call is found by its brackets and read as Python's syntax tree once it is complete. Its arguments are literals:
nothing is evaluated. The JSON words `true`, `false` and `null`, which models mix in, are literals too.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.tool_calls import CallFrame
from cortex.neuron.text.tools.call import NOTHING_YET, Call, CallProgress, CallReader, NotACall, well_formed

_MAX_CHARACTERS: Final = 1 << 20
"""A longer call is text: the syntax tree takes about a hundred bytes for each character."""
_MAX_DEPTH: Final = 50
_MAX_INTEGER_BITS: Final = 1024
"""Python writes larger ones in decimal only up to a limit of its own."""
_HEAD: Final = re.compile(r"\s*([A-Za-z_][\w.\-]{0,255})\(")
_BEGINNING: Final = re.compile(r"\s*(?:[A-Za-z_][\w.\-]{0,255})?")
_EVENT: Final = re.compile(r"""[()\[\]{}]|\"{3}|'{3}|["']""")
_STRING_EVENTS: Final = {
    quote: re.compile(rf"\\|{quote}" + ("|\n" if len(quote) == 1 else "")) for quote in ('"', "'", '"""', "'" * 3)
}
_WORDS: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None, "none": None}


class PythonicSyntax:
    bare_openings: tuple[str, ...] = ()
    separators = ",;"

    def __init__(self, frame: CallFrame, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: each tool's parameters by its name."""
        self._frame = frame
        self._schemas = schemas
        self.openings: tuple[str, ...] = (frame.opening,)
        self.next_openings = tuple(f"{name}(" for name in schemas)
        self.markers = frame.markers
        self.never_text = frame.markers if frame.is_control else ()

    def reader(self, opening: str) -> CallReader:
        begun = "" if opening == self._frame.opening else opening
        return PythonCallReader(self._frame.closing, self._schemas, begun)


class PythonCallReader:
    """Owned by one call of one response."""

    def __init__(self, closing: str, schemas: Mapping[str, Mapping[str, Any]], begun: str) -> None:
        """`closing`: the marker after the call or its list. `begun`: its beginning, which was already consumed."""
        self._closing = closing
        self._schemas = schemas
        self._text = begun
        """The call so far, after the bracket of its list."""
        self._may_be_item = not begun
        """Whether a bracket of a list may come before the call."""
        self._name: str | None = None
        self._end = _CallEnd()
        self._tail: str | None = None
        """What follows the call, once it is complete."""

    def feed(self, text: str) -> CallProgress:
        if self._tail is not None:
            self._tail += text
            return CallProgress(rest=self._rest())
        self._text += text
        if self._name is None and not self._find_name():
            return NOTHING_YET
        assert self._name is not None, "the name has been found"
        end = self._end.find(self._text)
        if len(self._text if end is None else self._text[:end]) > _MAX_CHARACTERS:
            raise NotACall
        if end is None:
            return NOTHING_YET
        call = _call(self._name, self._end.written, self._schemas)
        self._tail = self._text[end:]
        return CallProgress(call.name, call.arguments_json, self._rest())

    def finish(self) -> CallProgress:
        return NOTHING_YET if self._tail is None else CallProgress(rest="")

    def _find_name(self) -> bool:
        if self._may_be_item and (begun := self._text.lstrip()):
            self._text = begun.removeprefix("[")
            self._may_be_item = False
        found = _HEAD.match(self._text)
        if found is not None:
            self._name = found.group(1)
            self._text = self._text[found.end() - 1 :]
        elif len(self._text) > _MAX_CHARACTERS or not _BEGINNING.fullmatch(self._text):
            raise NotACall
        return found is not None

    def _rest(self) -> str | None:
        """The text after the end of the list and the closing marker; None until it is certain that there is none."""
        assert self._tail is not None, "the call is complete"
        following = self._tail.lstrip()
        rest = self._tail
        if following.startswith("]"):
            rest = following = following[1:].lstrip()
            if not self._closing:
                return rest
        if self._closing and following.startswith(self._closing):
            return following[len(self._closing) :]
        return None if self._closing.startswith(following) else rest


class _CallEnd:
    """Finds the bracket that closes a call. Every character is looked at once."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._quote: str | None = None
        self._kept: list[str] = []
        self._taken = 0

    @property
    def written(self) -> str:
        """The arguments in their brackets. Line breaks that models write in strings of one line are escaped."""
        return "".join(self._kept)

    def find(self, text: str) -> int | None:
        """Number of characters up to the end; None while it is missing. `text` is all text so far."""
        while True:
            pattern = _EVENT if self._quote is None else _STRING_EVENTS[self._quote]
            found = pattern.search(text, self._position)
            if found is None:
                self._position = max(self._position, len(text) - 2)  # which may begin three quotes
                return None
            if self._quote is None and found.group() in ('"', "'") and found.end() + 2 > len(text):
                self._position = found.start()
                return None
            self._position = found.end()
            if self._step(found, text):
                self._kept.append(text[self._taken : self._position])
                return self._position

    def _step(self, found: re.Match[str], text: str) -> bool:
        """Notes what was found; true for the end of the call."""
        event = found.group()
        if self._quote is not None:
            if event == "\\":
                self._position += 1
            elif event == "\n":
                self._kept += [text[self._taken : found.start()], "\\n"]
                self._taken = self._position
            else:
                self._quote = None
        elif event in ("(", "[", "{"):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise NotACall
        elif event in (")", "]", "}"):
            self._depth -= 1
        else:
            self._quote = event
        return self._depth == 0


def _call(name: str, arguments: str, schemas: Mapping[str, Mapping[str, Any]]) -> Call:
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            tree = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(tree, ast.Call):
            raise NotACall
        properties = schemas.get(name, {}).get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        values = dict(zip(names, map(_literal, tree.args), strict=False))
        for keyword in tree.keywords:
            value = _literal(keyword.value)
            values |= {keyword.arg: value} if keyword.arg is not None else value
        if len(tree.args) > len(names):
            raise NotACall
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotACall from error
    return Call(name, values)


def _literal(node: ast.expr) -> Any:
    """The JSON value of a literal; raises NotACall."""
    match node:
        case ast.Constant(value=str() as text):
            return well_formed(text)
        case ast.Constant(value=bool() | None as value):
            return value
        case ast.Constant(value=int() as value) if value.bit_length() <= _MAX_INTEGER_BITS:
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as operand):
            return -_literal(operand)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
    raise NotACall


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if not isinstance(key, str):
        raise NotACall
    return key
