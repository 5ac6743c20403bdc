"""The response object and its items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from cortex.wire.dialects.openai_chat.stream import logprobs_body
from cortex.wire.dialects.openai_chunks import output_details
from cortex.wire.dialects.openai_responses.client_tools import ID_PREFIXES, call_fields
from cortex.wire.events import Finish, TokenLogprob, Usage
from cortex.wire.fields.custom_tools import input_of
from cortex.wire.fields.request_class import tier_of
from cortex.wire.requests import GenerateRequest, Reasoning, Text, Tool, ToolCall
from cortex.wire.response import Block

Status = Literal["in_progress", "completed", "incomplete"]


def response_body(request: GenerateRequest, *, id: str, created: int, model: str) -> dict[str, Any]:
    """The response object at its start."""
    echoed = request.metadata
    sampling = request.sampling
    stated = {name: echoed[name] for name in ("background", "conversation") if echoed.get(name)}
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": echoed.get("instructions"),
        "max_output_tokens": sampling.max_tokens,
        "max_tool_calls": echoed.get("max_tool_calls"),
        "metadata": echoed.get("metadata", {}),
        "model": model,
        "output": [],
        "parallel_tool_calls": request.tool_choice.parallel,
        "previous_response_id": echoed.get("previous_response_id"),
        "prompt_cache_key": echoed.get("prompt_cache_key"),
        "reasoning": echoed.get("reasoning", {"effort": None, "summary": None}),
        "safety_identifier": echoed.get("safety_identifier"),
        "service_tier": tier_of(request.request_class or "default") if request.echoes_tier else None,
        "store": echoed.get("store", False),
        "temperature": sampling.temperature,
        "text": echoed.get("text", {"format": {"type": "text"}}),
        "tool_choice": echoed.get("tool_choice", "auto"),
        "tools": echoed.get("tools", []),
        "top_logprobs": sampling.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": echoed.get("truncation", "disabled"),
        "usage": None,
        "user": echoed.get("user"),
    } | stated


def finished(response: dict[str, Any], items: Sequence[dict[str, Any]], finish: Finish) -> dict[str, Any]:
    """`response` when it is completed or incomplete."""
    incomplete_reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(finish.reason)
    return {
        **response,
        "status": "completed" if incomplete_reason is None else "incomplete",
        "incomplete_details": None if incomplete_reason is None else {"reason": incomplete_reason},
        "output": list(items),
        "usage": usage_body(finish.usage),
    }


def failed(response: dict[str, Any], items: Sequence[dict[str, Any]], code: str, message: str) -> dict[str, Any]:
    """`response` after an error, with the items until then."""
    return {**response, "status": "failed", "output": list(items), "error": {"code": code, "message": message}}


_ID_PREFIXES: dict[type[Block], str] = {Text: "msg", Reasoning: "rs", ToolCall: "fc"}


def item_id(kind: type[Block], response_id: str, position: int, tool: Tool | None = None) -> str:
    """An id from the response's id, so that a streamed and a whole response have the same item ids. `tool` is that of
    a call."""
    prefix = _ID_PREFIXES[kind]
    if tool is not None:
        prefix = ID_PREFIXES[tool.shape] if tool.shape else "ctc" if tool.is_custom else prefix
    return f"{prefix}_{response_id.removeprefix('resp_')}_{position}"


def item_body(
    block: Block,
    id: str,
    logprobs: Sequence[TokenLogprob],
    *,
    status: Status,
    tool: Tool | None = None,
    summarized: bool = False,
) -> dict[str, Any]:
    """An output item. Text and reasoning items have exactly one part. `tool` is that of a call, if the request has it.
    `summarized`: reasoning is the item's summary, word for word; models write no other."""
    if isinstance(block, ToolCall):
        return {"id": id, **_call_body(block, tool), "status": status}
    if isinstance(block, Reasoning):
        content = [] if summarized else [{"type": "reasoning_text", "text": block.text}]
        summary = [{"type": "summary_text", "text": block.text}] if summarized else []
        return {"id": id, "type": "reasoning", "status": status, "summary": summary, "content": content}
    part = {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": logprobs_body(logprobs)["content"],
    }
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def _call_body(call: ToolCall, tool: Tool | None) -> dict[str, Any]:
    if tool is not None and tool.shape is not None and (fields := call_fields(tool.shape, call)) is not None:
        return {"type": f"{tool.shape}_call", "call_id": call.id, **fields}
    named: dict[str, Any] = {"call_id": call.id, "name": call.name}
    if tool is not None and tool.namespace is not None:
        named |= {"name": tool.own_name, "namespace": tool.namespace}
    if tool is not None and tool.is_custom:
        return {"type": "custom_tool_call", **named, "input": input_of(call.arguments)}
    return {"type": "function_call", **named, "arguments": call.arguments}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": output_details(usage),
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
