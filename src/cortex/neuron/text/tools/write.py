"""Writes tool calls in each syntax, the way the models were trained to: for templates that do not show calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cortex.neuron.families.tool_calls import TagForm, ToolSyntax
from cortex.neuron.text.tools.call import json_text
from cortex.neuron.text.tools.unquoted import QUOTE


class TextPiece(NamedTuple):
    """A piece of a call's text."""

    text: str
    is_markup: bool
    """Whether it is the syntax, whose control tokens are meant, and not a value."""


class MarkupText(str):
    """Text with markup in it. Only the control tokens in the markup are meant as such."""

    pieces: tuple[TextPiece, ...]

    def __new__(cls, pieces: Sequence[TextPiece]) -> MarkupText:
        text = super().__new__(cls, "".join(piece.text for piece in pieces))
        text.pieces = tuple(pieces)
        return text


def written_calls(calls: Sequence[tuple[str, Mapping[str, Any]]], syntax: ToolSyntax) -> list[TextPiece]:
    """Calls of one turn: the name of each and its arguments. Harmony has no such form: its templates show calls."""
    frame = syntax.frame
    bodies = [list(_body(name, arguments, syntax)) for name, arguments in calls]
    if frame is None:
        return _joined(bodies, "\n")
    if frame.before.startswith("["):  # one list for all
        bodies = [_joined(bodies, ", ")]
    framed = [[*_markup(frame.opening + frame.before), *body, *_markup(frame.after + frame.closing)] for body in bodies]
    begin, end = frame.section or ("", "")
    return [*_markup(begin), *_joined(framed, "\n" if frame.before == "\n" else ""), *_markup(end)]


def _body(name: str, arguments: Mapping[str, Any], syntax: ToolSyntax) -> Iterator[TextPiece]:
    if syntax.tags is not None:
        yield from _tagged(name, arguments, syntax.tags)
    elif syntax.kind == "python":
        written = ", ".join(f"{key}={json_text(value)}" for key, value in arguments.items())
        if not all(map(str.isidentifier, arguments)):
            written = f"**{json_text(dict(arguments))}"
        yield TextPiece(f"{name}({written})", False)
    elif syntax.kind == "unquoted":
        yield TextPiece(f"call:{name}", False)
        yield from _unquoted_value(arguments)
    elif syntax.kind == "named" and (named := syntax.named) is not None:
        yield from _markup("".join(named.before))
        yield TextPiece(name, False)
        yield from _markup("".join(named.between))
        yield TextPiece(json_text(dict(arguments)), False)
    else:
        name_key, arguments_key = syntax.keys
        yield TextPiece(json_text({name_key: name, arguments_key: dict(arguments)}), False)


def _tagged(name: str, arguments: Mapping[str, Any], form: TagForm) -> Iterator[TextPiece]:
    yield from _markup(form.function_open + form.quote)
    yield TextPiece(name, False)
    yield from _markup(f"{form.quote}{form.function_name_close}\n")
    for key, value in arguments.items():
        stated = f' string="{json.dumps(isinstance(value, str))}"' if form.says_type else ""
        yield from _markup(form.parameter_open + form.quote)
        yield TextPiece(key, False)
        yield from _markup(form.quote + stated + "".join(form.parameter_name_close) + form.value_break)
        yield TextPiece(value if isinstance(value, str) else json_text(value), False)
        yield from _markup(f"{form.value_break}{form.parameter_close}\n")
    if form.closing:
        yield from _markup(form.function_close)


def _unquoted_value(value: Any) -> Iterator[TextPiece]:
    match value:
        case str():
            yield from (TextPiece(QUOTE, True), TextPiece(value, False), TextPiece(QUOTE, True))
        case Mapping():
            yield TextPiece("{", True)
            for place, (key, item) in enumerate(value.items()):
                yield TextPiece(f"{',' if place else ''}{key}:", False)
                yield from _unquoted_value(item)
            yield TextPiece("}", True)
        case list():
            yield TextPiece("[", True)
            for place, item in enumerate(value):
                yield TextPiece("," if place else "", True)
                yield from _unquoted_value(item)
            yield TextPiece("]", True)
        case _:
            yield TextPiece(json_text(value), False)


def _markup(text: str) -> list[TextPiece]:
    return [TextPiece(text, True)] if text else []


def _joined(parts: Sequence[Sequence[TextPiece]], separator: str) -> list[TextPiece]:
    joined: list[TextPiece] = []
    for place, part in enumerate(parts):
        joined += [*(_markup(separator) if place else []), *part]
    return joined
