"""Finds constraints of requests that no grammar can express. Pure."""

from __future__ import annotations

from cortex.wire.fields.relaxed_schema import relaxed
from cortex.wire.requests import GenerateRequest


def is_constrained(request: GenerateRequest) -> bool:
    mode = request.tool_choice.mode
    return request.output is not None or mode in ("required", "named") or _is_restricted(request) or _forbids(request)


def _is_restricted(request: GenerateRequest) -> bool:
    """Whether the model may call only some of the tools in its prompt."""
    return request.tool_choice.mode == "auto" and request.callable_tools != request.tools


def _forbids(request: GenerateRequest) -> bool:
    """Whether the prompt has tools that the model must not call."""
    return request.tool_choice.mode == "none" and bool(request.tools)


def unenforced_parts(request: GenerateRequest) -> tuple[str, ...]:
    """The paths of schema parts that the output is not constrained to although the request asks for it."""
    removed: list[str] = []
    if request.output is not None and request.output.schema is not None:
        removed += relaxed(request.output.schema).removed
    if is_constrained(request) and request.tool_choice.mode != "none":
        for tool in request.callable_tools:
            removed += relaxed(tool.parameters, f"tools.{tool.name}.parameters").removed
    return tuple(removed)
