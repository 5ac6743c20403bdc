"""Detects the syntax of a model's output from its chat template.

A template writes the tool calls and reasoning of earlier turns in the model's own syntax, so it contains the markers of
one (`families/registry.py`, listed in docs/models.md). A template with a place for tools and no markers means the
syntax whose markers are tokens of the model, Llama's JSON if it spells `"name"` and `"parameters"`, or else plain JSON.
A template without a place for tools gets Hermes JSON, as `template/conversation.py` describes it to the model.

A model whose template contains one of the pairs in `REASONING_MARKERS` writes its reasoning between them.
With one of `RESPONSE_TAGS`, its response may be between tags as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cortex.neuron.families.family import ReasoningMarkers
from cortex.neuron.families.registry import REASONING_MARKERS, SYNTAXES
from cortex.neuron.families.tool_calls import HERMES_JSON, PLAIN_JSON, ToolSyntax
from cortex.neuron.text.template.chat_template import ChatTemplate

RESPONSE_TAGS: Final = (("<response>", "</response>"), ("<answer>", "</answer>"))
"""Tags around the response. `<response>` is also a tag around results of tools."""
_SPELLS_NAME: Final = re.compile(r"""\\?["']name\\?["']\s*:""")
_SPELLS_PARAMETERS: Final = re.compile(r"""\\?["']parameters\\?["']\s*:""")
_SPELLED: Final = next(syntax for syntax in SYNTAXES.values() if syntax.kind == "python_tag")
MARKERS: Final = sorted(
    ((group, syntax) for syntax in SYNTAXES.values() for group in syntax.markers),
    key=lambda row: (row[1].precedence, -len(row[0])),
)
"""Parts of templates and the syntaxes that they indicate; the first match decides."""


def tool_syntax(template: ChatTemplate, has_token: Callable[[str], bool] = lambda _: False) -> ToolSyntax:
    """`has_token`: whether a text is one token of the model. It decides if the template has a place for tools and shows
    no calls."""
    if not template.takes_tools and not template.shows_calls:
        return HERMES_JSON
    if (syntax := _marked(template.mentions)) is not None:
        return syntax
    if not template.takes_tools:
        return HERMES_JSON
    if _SPELLS_NAME.search(template.source) and _SPELLS_PARAMETERS.search(template.source):
        return _SPELLED
    return _marked(has_token) or PLAIN_JSON


def _marked(has: Callable[[str], bool]) -> ToolSyntax | None:
    return next((syntax for markers, syntax in MARKERS if all(map(has, markers))), None)


def reasoning_markers(template: ChatTemplate) -> ReasoningMarkers | None:
    # The closing marker decides: a template that strips old reasoning contains it.
    found = next((markers for markers in REASONING_MARKERS if template.mentions(markers.close)), None) or next(
        (markers for markers in REASONING_MARKERS if template.mentions(markers.open)), None
    )
    response_tags = next((tags for tags in RESPONSE_TAGS if all(map(template.mentions, tags))), None)
    return found if found is None or response_tags is None else replace(found, response_tags=response_tags)
