"""What the template of gpt-oss (harmony) needs of a request, besides the form of calls (`call_form.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cortex.neuron.families.tool_calls import HARMONY
from cortex.neuron.text.output.detect import tool_syntax
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.wire.errors import InvalidValue, shorten

_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""The model always reasons, at one of three efforts."""


def is_harmony(template: ChatTemplate) -> bool:
    return tool_syntax(template) is HARMONY


def known_effort(effort: str | None, *, is_off: bool) -> dict[str, str]:
    """The variable for the effort that is nearest to what the client asks for; none if it asks for nothing."""
    wanted = "none" if is_off else effort
    return {} if wanted is None else {"reasoning_effort": _EFFORTS.get(wanted, wanted)}


def described_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The template joins descriptions, and defaults of a choice, to other text."""
    return [{**tool, "function": _described(tool["function"])} for tool in tools]


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function["parameters"]
    properties = parameters.get("properties")
    if isinstance(properties, Mapping):
        written = {name: _with_written_default(schema) for name, schema in properties.items()}
        parameters = {**parameters, "properties": written}
    return {"description": "", **function, "parameters": parameters}


def _with_written_default(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or not {"enum", "oneOf"} & schema.keys():
        return schema
    default = schema.get("default", "")
    return schema if isinstance(default, str) else {**schema, "default": json.dumps(default, ensure_ascii=False)}


def reject_built_in_tools(template_args: Mapping[str, Any]) -> None:
    """Raises InvalidValue for tools that the model was trained with: nothing here runs them."""
    if tools := template_args.get("builtin_tools"):
        raise InvalidValue(
            f"the built-in tools {shorten(str(tools))} do not run here; remove builtin_tools, or send your own tools",
            param="chat_template_kwargs",
        )
