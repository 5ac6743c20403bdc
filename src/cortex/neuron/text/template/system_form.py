"""The form in which a template accepts more than one system message.

Agents send several: Codex begins with two, Claude Code puts some into the middle of the conversation. Some templates
reject or skip all but the first. A template's source does not say so reliably, so it is probed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.wire.errors import TemplateRenderFailed

_FIRST: Final = "first probed text"
_OTHER: Final = "other probed text"
_USER: Final = {"role": "user", "content": "x"}
_ASSISTANT: Final = {"role": "assistant", "content": "y"}


@dataclass(frozen=True, slots=True)
class SystemForm:
    takes_several: bool = True
    """Whether the template accepts several at the beginning; else they become one message, joined by an empty line."""
    takes_later: bool = True
    """Whether the template accepts them after other turns; else they become user messages in the same place."""

    def fit(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages` in the form that the template accepts."""
        num_leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        leading, later = messages[:num_leading], messages[num_leading:]
        if not self.takes_several and num_leading > 1:
            leading = [{**leading[0], "content": "\n\n".join(message["content"] for message in leading)}]
        if not self.takes_later:
            later = [{**message, "role": "user"} if message["role"] == "system" else message for message in later]
        return [*leading, *later]


@lru_cache(maxsize=64)
def system_form(template: ChatTemplate) -> SystemForm:
    """The form that the template shows completely; the default form if it accepts no system message at all."""
    first, other = ({"role": "system", "content": text} for text in (_FIRST, _OTHER))
    if not takes_system(template):
        return SystemForm()
    return SystemForm(
        takes_several=_shows(template, [first, other, _USER]),
        takes_later=_shows(template, [first, _USER, _ASSISTANT, other, _USER]),
    )


@lru_cache(maxsize=64)
def takes_system(template: ChatTemplate) -> bool:
    """Whether the template shows a system message at the beginning."""
    return _shows(template, [{"role": "system", "content": _FIRST}, _USER])


def _shows(template: ChatTemplate, messages: list[dict[str, Any]]) -> bool:
    try:
        text = template.render({"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True})
    except TemplateRenderFailed:
        return False
    return all(message["content"] in text for message in messages if message["role"] == "system")
