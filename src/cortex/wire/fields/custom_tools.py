"""Custom tools: the client expects free text, the model sees a function with the one text parameter `input`."""

from __future__ import annotations

import re
from typing import Final

from cortex.wire.errors import shorten
from cortex.wire.fields.body import Fields, json_text
from cortex.wire.requests import Tool

_PARAMETER: Final = "input"
_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGUN_HEAD: Final = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
"""The arguments of a call that was cut off before its input."""
_COMPLETE: Final = re.compile(
    r"(?:[^\"\\]"
    r"|\\[^u]"
    r"|\\u(?![dD][89abAB])[\da-fA-F]{4}"
    r"|\\u[dD][89abAB][\da-fA-F]{2}(?:\\u[dD][c-fC-F][\da-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]))"
    r"|\\u(?=[\da-fA-F]{0,3}[^\da-fA-F])"
    r")*",
    re.DOTALL,
)
"""Characters of a JSON string up to its end, or up to an escape that is incomplete. Half a pair of escapes is complete
once no other half follows; what is no escape, which models do write, is text."""
_ESCAPE: Final = re.compile(
    r"\\u([dD][89abAB][\da-fA-F]{2})\\u([dD][c-fC-F][\da-fA-F]{2})|\\u([\da-fA-F]{4})|\\(.)", re.DOTALL
)
_SHORT: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def read_custom_tool(fields: Fields) -> Tool:
    """The definition of a custom tool. Its grammar, if it has one, is shown to the model."""
    description = fields.text("description") or ""
    form = fields.object("format")
    kind = form.text("type") if form is not None else None
    if form is not None and kind == "grammar":
        grammar = form.object("grammar") or form  # nested in chat completions
        syntax = grammar.text("syntax") or "lark"
        if syntax not in ("lark", "regex"):
            raise grammar.invalid("syntax", f"'{shorten(syntax)}' is not known; use lark or regex")
        rule = "regular expression" if syntax == "regex" else "Lark grammar"
        description += f"\n\nThe input must match this {rule}:\n{grammar.required_text('definition')}"
    elif form is not None and kind not in (None, "text"):
        raise form.invalid("type", f"'{shorten(kind or '')}' is not known; use text or grammar")
    return Tool(
        name=fields.required_text("name"),
        description=description.strip() or None,
        parameters={
            "type": "object",
            "properties": {_PARAMETER: {"type": "string", "description": "The free text that the tool gets."}},
            "required": [_PARAMETER],
            "additionalProperties": False,
        },
        is_custom=True,
    )


def has_grammar(fields: Fields) -> bool:
    """Whether the definition of a custom tool has a grammar, which is not enforced."""
    form = fields.object("format")
    return form is not None and form.text("type") == "grammar"


def arguments_of(text: str) -> str:
    """The arguments of a call with this input, as JSON text."""
    return json_text({_PARAMETER: text})


def input_of(arguments: str) -> str:
    """The input of a call with these arguments, complete or not."""
    decoder = InputDecoder()
    return decoder.push(arguments) + decoder.finish()


class InputDecoder:
    """Decodes the arguments of one call into its input as they stream. Arguments of another shape are the input."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._has_ended = False

    def push(self, piece: str) -> str:
        """The next text of the input."""
        if self._has_ended:
            return ""
        self._held += piece
        if not self._is_inside:
            head = _HEAD.match(self._held)
            if head is None:
                return ""
            self._is_inside = True
            self._held = self._held[head.end() :]
        found = _COMPLETE.match(self._held)
        assert found is not None, "the pattern matches the empty text"
        self._held = self._held[found.end() :]
        self._has_ended = self._held.startswith('"')
        return _decoded(found.group())

    def finish(self) -> str:
        """The rest, after the last piece: nothing, unless the arguments have another shape."""
        if self._is_inside or self._held.strip() == "{}" or _BEGUN_HEAD.fullmatch(self._held):
            return ""
        return self._held


def _decoded(text: str) -> str:
    """A part of a JSON string, with U+FFFD for half a pair. What is no escape stays as the model wrote it."""
    return _ESCAPE.sub(_character, text)


def _character(escape: re.Match[str]) -> str:
    high, low, unit, short = escape.groups()
    if high is not None:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if unit is not None:
        return "\ufffd" if 0xD800 <= int(unit, 16) < 0xE000 else chr(int(unit, 16))
    return _SHORT.get(short, escape.group())
