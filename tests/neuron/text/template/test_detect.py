from __future__ import annotations

import pytest

from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.detect import reasoning_markers, tool_syntax

from ..syntax_names import S
from ..syntax_templates import MENTIONS, template_of


@pytest.mark.parametrize("syntax", MENTIONS)
def test_markers_of_the_template_decide(syntax: ToolSyntax) -> None:
    assert tool_syntax(ChatTemplate(template_of(syntax))) is syntax


def test_without_a_place_for_tools_calls_are_as_the_generic_description_has_them() -> None:
    assert tool_syntax(ChatTemplate("{{ messages }} [TOOL_CALLS]")) is S.HERMES_JSON


@pytest.mark.parametrize("opening", ["<think>", "[THINK]", "<seed:think>", "<|START_THINKING|>", "<|channel>thought"])
def test_reasoning_is_between_the_markers_of_the_template(opening: str) -> None:
    markers = reasoning_markers(ChatTemplate(f"{{{{ messages }}}}{opening}"))
    assert markers is not None
    assert markers.open == opening
