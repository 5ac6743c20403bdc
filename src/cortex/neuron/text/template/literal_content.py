"""Keeps text of clients literal: `<|im_start|>` in a message stays these characters and does not become the control
token.

A template mixes its own text, whose control tokens are meant, with text of clients, which it may cut and join. So a
second rendering follows the text of clients: in it, each of their characters that a control token could begin with is
followed by a mark. A control token of the prompt that begins at a marked character is literal. Words that the template
itself looks for, such as `</think>`, get no mark, so it takes the same branches. The prompt is that of the first
rendering; text without control tokens is never changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.tokenizer.vocabulary import Vocabulary
from cortex.neuron.text.tools.write import MarkupText
from cortex.wire.errors import InvalidValue

_MARKS: Final = tuple(map(chr, (*range(0xFDD0, 0xFDF0), *range(0xF000, 0xF900))))
"""Characters that text rarely contains: noncharacters, then those for private use. An unused one becomes the mark."""

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LiteralText:
    """A rendered prompt, and the characters in it at which no control token begins, ascending."""

    text: str
    literal_at: tuple[int, ...] = ()


class LiteralContent:
    """The control tokens of a vocabulary in the conversations of one template. Immutable."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate, also: Iterable[str] = ()) -> None:
        """The vocabulary must have control tokens. `also`: further texts that are literal in messages."""
        self._controls = vocabulary.control_texts | frozenset(also)
        self._control = re.compile(_any_of(self._controls))
        self._first_characters = {text[0] for text in self._controls}
        ordinary = {token.text for token in vocabulary.whole_tokens} - self._controls
        words = {
            word
            for text in (*ordinary, *template.literals)
            for word in _words(text, self._first_characters)
            if not any(control.startswith(word) or word.startswith(control) for control in self._controls)
        }
        # Shorter ones first: they may be the ends of longer ones.
        self._unmarked_words = sorted(words, key=len)

    def render(self, render: Callable[[Values], str], values: Values, trusted: Iterable[str]) -> LiteralText:
        """The prompt that `render` makes of `values`; those that `trusted` names are not text of clients.

        Raises InvalidValue for text that contains every possible mark, and what `render` raises.
        """
        text = render(values)
        content = {name: value for name, value in values.items() if name not in frozenset(trusted)}
        if not any(character in each for each in _strings(content) for character in self._first_characters):
            return LiteralText(text)
        mark = _unused_mark(content)
        try:
            marked = render({**values, **self._marked(content, mark)})
        except RecursionError:
            raise InvalidValue("the conversation is nested too deeply; flatten it", param="messages") from None
        # A template may have written marks as JSON escapes.
        marked = marked.replace(json.dumps(mark)[1:-1], mark)
        followed = marked.replace(mark, "")
        if followed != text:
            # The template treats the mark as text. If that changes no control token, none is from a client.
            if self._control.findall(marked) == self._control.findall(text):
                return LiteralText(text)
            text = followed
        return LiteralText(text, tuple(self._literal_at(marked, mark)))

    def _marked(self, value: Any, mark: str) -> Any:
        match value:
            case MarkupText(pieces=pieces):
                return "".join(each.text if each.is_markup else self._marked_text(each.text, mark) for each in pieces)
            case str():
                return self._marked_text(value, mark)
            case Mapping():
                return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
            case list() | tuple():
                return [self._marked(item, mark) for item in value]
        return value

    def _marked_text(self, text: str, mark: str) -> str:
        if not any(character in text for character in self._first_characters):
            return text
        for character in self._first_characters:
            text = text.replace(character, character + mark)
        for word in self._unmarked_words:
            text = text.replace(word[0] + mark + word[1:], word)
        return text

    def _literal_at(self, marked: str, mark: str) -> Iterator[int]:
        """Where control tokens begin at a marked character, as positions in the text without marks."""
        num_marks = position = 0
        for found in _marked_controls(self._controls, mark).finditer(marked):
            num_marks += marked.count(mark, position, found.start())
            position = found.start()
            yield position - num_marks


@lru_cache(maxsize=16)
def _marked_controls(controls: frozenset[str], mark: str) -> re.Pattern[str]:
    """Finds control tokens whose first character is marked; their other characters may be marked too. Uses a
    look-ahead, because one may begin inside another."""
    rests: dict[str, list[str]] = {}
    for control in sorted(controls):
        rests.setdefault(control[0], []).append(f"{mark}?".join(map(re.escape, control[1:])))
    return re.compile("|".join(f"{re.escape(first)}{mark}(?={'|'.join(each)})" for first, each in rests.items()))


def _words(text: str, first_characters: set[str]) -> Iterator[str]:
    """The ends of `text` that begin with one of these characters."""
    return (text[at:] for at, character in enumerate(text) if character in first_characters)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern that prefers longer texts, as tokenizers do."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def _strings(value: Any) -> Iterator[str]:
    """Every string in plain data, keys included."""
    unread = [value]
    while unread:
        match unread.pop():
            case str() as text:
                yield text
            case Mapping() as mapping:
                unread += (*mapping.keys(), *mapping.values())
            case list() | tuple() as items:
                unread += items


def _unused_mark(content: Values) -> str:
    for mark in _MARKS:
        if not any(mark in text for text in _strings(content)):
            return mark
    raise InvalidValue("the conversation has every character from U+F000 to U+F8FF; remove one", param="messages")
