"""In which form a template takes system messages beyond the first.

Agents send several: Codex begins with two, Claude Code puts some into the middle of the conversation. Some templates
refuse or skip all but the first. Nothing in a template's text says so reliably, so it is tried out.
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
    """Several at the beginning, one after the other; else they are one message, joined by an empty line."""
    takes_later: bool = True
    """After other turns; else they are the user's, in their place: the words must reach the model, in their order."""

    def fit(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages` as the template takes them."""
        num_leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        leading, later = messages[:num_leading], messages[num_leading:]
        if not self.takes_several and num_leading > 1:
            leading = [{**leading[0], "content": "\n\n".join(message["content"] for message in leading)}]
        if not self.takes_later:
            later = [{**message, "role": "user"} if message["role"] == "system" else message for message in later]
        return [*leading, *later]


@lru_cache(maxsize=64)
def system_form(template: ChatTemplate) -> SystemForm:
    """What the template shows as it is given; the plain form where it takes no system message at all."""
    first, other = ({"role": "system", "content": text} for text in (_FIRST, _OTHER))
    if not _shows(template, [first, _USER]):
        return SystemForm()
    return SystemForm(
        takes_several=_shows(template, [first, other, _USER]),
        takes_later=_shows(template, [first, _USER, _ASSISTANT, other, _USER]),
    )


def _shows(template: ChatTemplate, messages: list[dict[str, Any]]) -> bool:
    try:
        text = template.render({"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True})
    except TemplateRenderFailed:
        return False
    return all(message["content"] in text for message in messages if message["role"] == "system")
