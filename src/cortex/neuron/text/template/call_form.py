"""The form in which a template expects the tool calls of earlier turns.

Nearly all iterate over arguments as an object, with empty content. A few insert arguments as text, some show the calls
of a turn only if its content is none, and those of Mistral accept only ids of nine letters and digits. A template's
source does not say so reliably, so it is probed. That of gpt-oss shows only the first call of a turn, and rejects
calls together with both text and reasoning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.wire.errors import TemplateRenderFailed

_ID: Final = "call_0123456789abcdef01234567"
_NUM_SHORT_ID_CHARACTERS: Final = 9
_NAME: Final = "probed_function"
_OTHER_NAME: Final = "first_function"
_VALUE: Final = "probed value"
_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class CallForm:
    empty_content: str | None = ""
    """The content of a turn that only calls tools."""
    arguments_as_text: bool = False
    short_ids: bool = False
    """Whether ids of calls must have nine letters and digits."""
    takes_several: bool = True
    """Whether the template shows all calls of a turn; else each call is a turn of its own, before its result."""
    takes_both: bool = True
    """Whether a turn with calls may have text and reasoning; else both become its reasoning."""

    def id(self, id: str) -> str:
        """The id of a call for the template: the same for the call and its result."""
        if not self.short_ids or (len(id) == _NUM_SHORT_ID_CHARACTERS and id.isalnum()):
            return id
        return hashlib.sha256(id.encode(errors="replace")).hexdigest()[:_NUM_SHORT_ID_CHARACTERS]

    def arguments(self, text: str) -> Any:
        """Arguments, given as JSON text, for the template. Invalid JSON from a model stays text."""
        if self.arguments_as_text:
            return text or "{}"
        try:
            return json.loads(text, strict=False) if text.strip() else {}
        except (ValueError, RecursionError):
            return text


_FORMS: Final = tuple(
    CallForm(empty_content, arguments_as_text, short_ids)
    for short_ids in (False, True)
    for arguments_as_text in (False, True)
    for empty_content in ("", None)
)


@lru_cache(maxsize=64)
def call_form(template: ChatTemplate) -> CallForm:
    """The first form in which the template shows a complete call; the usual form if there is none."""
    form = next((form for form in _FORMS if _shows(template, form)), None)
    if form is None:
        return _FORMS[0]
    return replace(
        form,
        takes_several=_shows(template, form, (_OTHER_NAME, _NAME)),
        takes_both=not _shows(template, form, content="x")
        or _shows(template, form, content="x", reasoning_content="y", thinking="y"),
    )


def _shows(template: ChatTemplate, form: CallForm, names: Sequence[str] = (_NAME,), **turn: str) -> bool:
    """Whether the template shows a turn that calls `names`, the last of them with the probed value."""
    calls, results = [], []
    for number, name in enumerate(names):
        id = form.id(f"{_ID[:-1]}{number}")
        arguments = form.arguments(json.dumps({"a": _VALUE if name == _NAME else "z"}))
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        results.append({"role": "tool", "tool_call_id": id, "name": name, "content": "y"})
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": form.empty_content, "tool_calls": calls, **turn},
        *results,
    ]
    try:
        text = template.render(
            {
                **{"messages": messages, "tools": [_TOOL], "documents": None, "add_generation_prompt": True},
                **{"bos_token": "", "eos_token": ""},
            }
        )
    except TemplateRenderFailed:
        return False
    spells_none = form.empty_content is None and "None" in text
    return _NAME in text and _VALUE in text and not spells_none
