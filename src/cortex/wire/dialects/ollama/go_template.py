"""Ollama's prompt templates, which are Go templates, as chat templates in Jinja.

Converts the constructs for conversations: text, `.System`, `.Prompt` and `.Response`, or a loop over `.Messages`, and
conditions. Parts for tools and reasoning are left out, because a template without tools gets them described. Anything
else is an error, so a converted template writes what Ollama writes. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

SUPPORTED: Final = (
    "text, .System, .Prompt, .Response, range over .Messages with .Role and .Content, if, else, eq, ne, and, or, not, "
    "len and slice"
)

_ACTION: Final = re.compile(r"\{\{(-\s)?\s*(/\*.*?\*/|.*?)\s*(\s-)?\}\}", re.DOTALL)
_TOKEN: Final = re.compile(r'\s*("(?:[^"\\]|\\.)*"|`[^`]*`|\d+|\$?\.?[A-Za-z_][\w.]*|\$[.\w]*|:=|[=().|,])')
_SPACE: Final = " \t\r\n"
_TRUE, _FALSE, _TURNS = "true", "false", "ns.turns"
_ABSENT: Final = frozenset(
    {
        "Tools",
        "ToolCalls",
        "ToolName",
        "ToolCallID",
        "Suffix",
        "Thinking",
        "Think",
        "ThinkLevel",
        "IsThinkSet",
        "Images",
    }
)
"""Fields that a conversion leaves empty."""
_OF_MESSAGES: Final = {"Role": "message.role", "Content": "message.content"}
_OF_TURNS: Final = {"System": "system", "Prompt": "prompt", "Response": "response"}
_COLLATED: Final = (
    "{%- set ns = namespace(system='', turns=[]) -%}"
    "{%- for m in messages -%}"
    "{%- if m.content is not none and m.content is not string -%}"
    "{{ raise_exception('the TEMPLATE of its Modelfile takes text only') }}{%- endif -%}"
    "{%- if m.role == 'system' -%}"
    "{%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + (m.content or '') -%}{%- endif -%}"
    "{%- if ns.turns and ns.turns[-1].role == m.role -%}"
    "{%- set both = ns.turns[-1].content + ('\\n\\n' + m.content if m.content else '') -%}"
    "{%- set ns.turns = ns.turns[:-1] + [{'role': m.role, 'content': both}] -%}"
    "{%- else -%}{%- set ns.turns = ns.turns + [{'role': m.role, 'content': m.content or ''}] -%}{%- endif -%}"
    "{%- endfor -%}"
)
"""Merges consecutive messages of one role, as Ollama does."""
_RESET: Final = "{%- set ns.system = '' -%}{%- set ns.prompt = '' -%}{%- set ns.response = '' -%}"
_ARGUMENTS: Final = "(ns.system, ns.prompt, ns.response)"
_BY_TURNS: Final = (
    f"{_RESET}{{%- for m in ns.turns -%}}"
    "{%- if m.role == 'assistant' -%}{%- set ns.response = m.content -%}"
    "{%- else -%}"
    "{%- if ns.response or (m.role == 'system' and ns.prompt) -%}"
    "{{ turn" + _ARGUMENTS + " }}" + _RESET + "{%- endif -%}"
    "{%- if m.role == 'system' -%}{%- set ns.system = m.content -%}"
    "{%- else -%}{%- set ns.prompt = ns.prompt + ('\\n\\n' if ns.prompt else '') + m.content -%}{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if ns.response and not add_generation_prompt -%}{{ turn" + _ARGUMENTS + " }}"
    "{%- else -%}{{ opening" + _ARGUMENTS + " }}{%- endif -%}"
)
"""A template without `.Messages` writes one turn: a system prompt, a prompt and a response. The last ends with its
response."""


class TemplateProblem(ValueError):
    """A template that cannot be converted; the message says why."""


def to_jinja(template: str) -> str:
    """The chat template that writes what `template` writes. Raises TemplateProblem."""
    pieces = _pieces(template)
    if not any(isinstance(each, _Action) for each in pieces):
        raise TemplateProblem("it has no place for messages")
    by_messages = any(re.search(r"\.Messages\b", each.text) for each in pieces if isinstance(each, _Action))
    begin = _begin(pieces)
    if by_messages:
        body = "".join(_Conversion(pieces, by_messages=True).whole())
        return f"{_COLLATED}{{%- set system = ns.system -%}}{begin}{body}"
    if not any(re.search(r"\.Response\b", each.text) for each in pieces if isinstance(each, _Action)):
        pieces = [*pieces, _Action(".Response")]
    conversion = _Conversion(pieces, by_messages=False)
    whole = list(conversion.whole())
    if conversion.response_at is None:
        raise TemplateProblem("its .Response is inside of an if")
    macros = "".join(
        f"{{%- macro {name}(system, prompt, response) -%}}{''.join(parts)}{{%- endmacro -%}}"
        for name, parts in (("turn", whole), ("opening", whole[: conversion.response_at]))
    )
    return f"{macros}{_COLLATED}{begin}{_BY_TURNS}"


def _begin(pieces: Sequence[str | _Action]) -> str:
    """The token that begins a document, which Ollama's tokenizers add, unless the template writes it."""
    start = "(document_start | default(''))"
    written = json.dumps("".join(each for each in pieces if isinstance(each, str)), ensure_ascii=False)
    return f"{{%- if {start} not in {written} -%}}{{{{ {start} }}}}{{%- endif -%}}"


class _Action(NamedTuple):
    text: str


def _pieces(template: str) -> list[str | _Action]:
    """Texts and actions, with whitespace trimmed where actions say so."""
    pieces: list[str | _Action] = []
    at, trims = 0, False
    for found in _ACTION.finditer(template):
        text = template[at : found.start()]
        text = text.lstrip(_SPACE) if trims else text
        pieces.append(text.rstrip(_SPACE) if found[1] else text)
        if not found[2].startswith("/*"):
            pieces.append(_Action(found[2]))
        at, trims = found.end(), found[3] is not None
    rest = template[at:]
    pieces.append(rest.lstrip(_SPACE) if trims else rest)
    if any("{{" in each for each in pieces if isinstance(each, str)):
        raise TemplateProblem("a {{ is not closed")
    return [each for each in pieces if each]


@dataclass
class _Conversion:
    pieces: Sequence[str | _Action]
    by_messages: bool
    response_at: int | None = None
    """After how many parts of the whole its response ends."""
    _at: int = 0
    _in_loop: bool = False
    _variables: dict[str, str] = field(default_factory=dict)

    def whole(self) -> Iterator[str]:
        count = 0
        while self._at < len(self.pieces):
            piece = self.pieces[self._at]
            yield self._converted()
            count += 1
            if isinstance(piece, _Action) and piece.text == ".Response":
                self.response_at = count

    def _body(self) -> tuple[str, str]:
        """What follows, up to an `else` or `end` of its own, and that action."""
        parts: list[str] = []
        while self._at < len(self.pieces):
            piece = self.pieces[self._at]
            if isinstance(piece, _Action) and (piece.text == "end" or re.match(r"else\b", piece.text)):
                self._at += 1
                return "".join(parts), piece.text
            parts.append(self._converted())
        raise TemplateProblem("an if or range has no end")

    def _skipped(self) -> str:
        """Skip what follows, as `_body` reads it, whatever it is."""
        depth = 0
        while self._at < len(self.pieces):
            piece = self.pieces[self._at]
            self._at += 1
            if not isinstance(piece, _Action):
                continue
            if depth == 0 and (piece.text == "end" or re.match(r"else\b", piece.text)):
                return piece.text
            word = piece.text.split(maxsplit=1)[0]
            depth += word in ("if", "range", "with", "block", "define")
            depth -= word == "end"
        raise TemplateProblem("an if or range has no end")

    def _converted(self) -> str:
        """The next piece, with all that is inside of it."""
        piece = self.pieces[self._at]
        self._at += 1
        if isinstance(piece, str):
            return f"{{{{ {json.dumps(piece, ensure_ascii=False)} }}}}"
        word, rest = (*piece.text.split(maxsplit=1), "", "")[:2]
        match word:
            case "if":
                return self._if(rest)
            case "range":
                return self._range(rest)
            case "end" | "else":
                raise TemplateProblem(f"{{{{ {word} }}}} is not inside of an if or range")
        if assigned := re.fullmatch(r"(\$\w+)\s*:=\s*(.+)", piece.text, re.DOTALL):
            self._variables[assigned[1]] = self._expression(assigned[2])
            return ""
        value = self._expression(piece.text)
        return "" if value == _FALSE else f"{{{{ {value} }}}}"

    def _if(self, condition: str) -> str:
        """Branches that are never taken are skipped, because they may have unsupported constructs."""
        branches: list[tuple[str, str]] = []
        closing = f"else if {condition}"
        is_decided = False
        while closing != "end":
            word = closing.removeprefix("else").strip()
            if word and not word.startswith("if"):
                raise TemplateProblem(f"it has {{{{ {closing} }}}}")
            value = self._expression(word.removeprefix("if")) if word and not is_decided else _TRUE
            if is_decided or value == _FALSE:
                closing = self._skipped()
                continue
            is_decided = value in (_TRUE, _TURNS)
            body, closing = self._body()
            branches.append((_TRUE if is_decided else value, body))
        if not branches or branches[0][0] == _TRUE:
            return branches[0][1] if branches else ""
        parts = [
            f"{{%- {'if' if at == 0 else 'elif'} {value} -%}}{body}" if value != _TRUE else f"{{%- else -%}}{body}"
            for at, (value, body) in enumerate(branches)
        ]
        return f"{''.join(parts)}{{%- endif -%}}"

    def _range(self, what: str) -> str:
        names, _, source = what.rpartition(":=")
        if self._in_loop or self._expression(source) != _TURNS:
            if self._expression(source) != _FALSE:
                raise TemplateProblem(f"it has a range over {source.strip()}")
            if self._skipped() != "end":
                raise TemplateProblem("a range has an else")
            return ""
        index, _, message = names.partition(",")
        self._in_loop = True
        before = dict(self._variables)
        if message.strip():
            self._variables |= {index.strip(): "loop.index0", message.strip(): "message"}
        elif index.strip():
            self._variables[index.strip()] = "message"
        body, closing = self._body()
        if closing != "end":
            raise TemplateProblem("a range has an else")
        self._in_loop, self._variables = False, before
        return f"{{%- for message in ns.turns -%}}{body}{{%- endfor -%}}"

    def _expression(self, text: str) -> str:
        tokens, at = [], 0
        text = text.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise TemplateProblem(f"{{{{ {text[:80]} }}}} is not known")
            tokens.append(found[1])
            at = found.end()
        value, rest = self._command(tokens)
        if rest:
            raise TemplateProblem(f"{{{{ {text[:80]} }}}} is not known")
        return value

    def _command(self, tokens: Sequence[str]) -> tuple[str, Sequence[str]]:
        """A function with its arguments, or a value; and what follows."""
        if not tokens:
            raise TemplateProblem("an action is empty")
        name, rest = tokens[0], tokens[1:]
        if not name[0].isalpha() or name in (_TRUE, _FALSE):
            return self._operand(tokens)
        arguments = []
        while rest and rest[0] != ")":
            value, rest = self._operand(rest)
            arguments.append(value)
        return _call(name, arguments), rest

    def _operand(self, tokens: Sequence[str]) -> tuple[str, Sequence[str]]:
        token, rest = tokens[0], tokens[1:]
        if token == "(":
            value, rest = self._command(rest)
            if not rest or rest[0] != ")":
                raise TemplateProblem("a parenthesis is not closed")
            return value, rest[1:]
        if token in (_TRUE, _FALSE) or token.isdigit():
            return token, rest
        if token[0] == '"':
            try:
                return json.dumps(json.loads(token), ensure_ascii=False), rest
            except ValueError:
                raise TemplateProblem(f"it has the text {token[:80]}") from None
        if token[0] == "`":
            return json.dumps(token[1:-1], ensure_ascii=False), rest
        return self._variable(token), rest

    def _variable(self, token: str) -> str:
        if token in self._variables:
            return self._variables[token]
        owner, _, name = token.rpartition(".")
        is_message = self._in_loop and owner != "$"
        if owner not in ("", "$") and self._variables.get(owner) != "message":
            raise TemplateProblem(f"it has {token}")
        if name in _ABSENT:
            return _FALSE
        if is_message and name in _OF_MESSAGES:
            return _OF_MESSAGES[name]
        if not is_message and self.by_messages and name == "Messages":
            return _TURNS
        if not is_message and name in _OF_TURNS:
            return _FALSE if self.by_messages and name != "System" else _OF_TURNS[name]
        raise TemplateProblem(f"it has {token}")


_COMPARISONS: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _call(name: str, arguments: Sequence[str]) -> str:
    """A function of Go's templates. Constant conditions are folded."""
    match name, len(arguments):
        case ("and", count) if count:
            known = [each for each in arguments if each != _TRUE]
            return _FALSE if _FALSE in known else f"({' and '.join(known)})" if known else _TRUE
        case ("or", count) if count:
            known = [each for each in arguments if each != _FALSE]
            return _TRUE if _TRUE in known else f"({' or '.join(known)})" if known else _FALSE
        case ("not", 1):
            return {_TRUE: _FALSE, _FALSE: _TRUE}.get(arguments[0], f"(not {arguments[0]})")
        case ("len", 1) if arguments[0] != _FALSE:
            return f"({arguments[0]} | length)"
        case ("len", 1):
            return "0"
        case ("slice", 2):
            return f"{arguments[0]}[{arguments[1]}:]"
        case ("eq", count) if count > 1:
            return f"({' or '.join(f'{arguments[0]} == {each}' for each in arguments[1:])})"
        case (_, 2) if name in _COMPARISONS:
            return f"({arguments[0]} {_COMPARISONS[name]} {arguments[1]})"
    raise TemplateProblem(f"it has the function {name}")
