"""Compaction of the Responses API: a conversation becomes the latest messages of its user and one item with a summary.

The model that the client names writes the summary. The item is opaque to clients, as in OpenAI's API, and not secret:
the input of a later request may have it in place of what it sums up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import msgspec

from cortex.wire.dialects.openai_responses import DIALECT as RESPONSES
from cortex.wire.dialects.openai_responses.items import encoded
from cortex.wire.dialects.openai_responses.response import usage_body
from cortex.wire.errors import GenerationFailed, InvalidValue
from cortex.wire.events import AnyEvent
from cortex.wire.fields.body import Fields
from cortex.wire.preset import PresetFields
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest, Message, Text, ToolChoice
from cortex.wire.response import gather, total_usage

_ID_PREFIX = "cmp_"
MAX_KEPT_CHARS = 32_768
"""The latest messages of the user up to this size are returned; the summary has the others."""
MAX_SUMMARY_TOKENS = 8192
"""Limit of the summary, which would otherwise fill the context that it should free."""
PROMPT = (
    "Sum up the conversation so far for another assistant, who will continue it without seeing it. State the goal of "
    "the user and their constraints, what was done and decided, the summary, names, paths and values that are still "
    "needed, and what is left to do. Write the summary only; do not continue the conversation and call no tools."
)
_KEPT = "kept_messages"


def read_summary(fields: Fields) -> RequestSummary:
    """Raises `MissingModel` or `InvalidValue`."""
    summary = RESPONSES.read_summary(fields)
    return msgspec.structs.replace(summary, completion_limit=_limit(summary.completion_limit))


def _limit(asked: int | None) -> int:
    return min(asked or MAX_SUMMARY_TOKENS, MAX_SUMMARY_TOKENS)


def parse(body: bytes) -> GenerateRequest:
    """The request for the summary. Raises what the responses dialect does, and `InvalidValue` for a stream."""
    request = RESPONSES.parse(body)
    if request.stream:
        raise InvalidValue("stream: a compaction is one object; leave it out.", param="stream")
    limit = _limit(request.sampling.max_tokens)
    return msgspec.structs.replace(
        request,
        sampling=msgspec.structs.replace(request.sampling, max_tokens=limit),
        # Reasoning would take most of the limit.
        thinking=msgspec.structs.replace(request.thinking, off_by_default=True),
        messages=(*request.messages, Message(role="user", parts=(Text(text=PROMPT),))),
        tools=(),
        tool_choice=ToolChoice(),
        output=None,
        metadata={_KEPT: _latest(request.messages)},
    )


def _latest(messages: Iterable[Message]) -> list[str]:
    """The latest texts of the user, oldest first."""
    said = [
        "".join(part.text for part in message.parts if isinstance(part, Text))
        for message in messages
        if message.role == "user"
    ]
    kept: list[str] = []
    num_chars = 0
    for text in reversed(said):
        num_chars += len(text)
        if num_chars > MAX_KEPT_CHARS:
            break
        kept.append(text)
    return kept[::-1]


def fold(events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str) -> bytes:  # noqa: ARG001
    """The compacted conversation. Raises the error of a `Failure`, and `GenerationFailed` without a summary."""
    choices = gather(events)
    summary = choices[0].text.strip()
    if not summary:
        raise GenerationFailed("The model wrote no summary of the conversation; try again, or name another model.")
    stem = id.removeprefix(_ID_PREFIX)
    kept: list[dict[str, Any]] = [
        {
            "id": f"msg_{stem}_{position}",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": text}],
        }
        for position, text in enumerate(request.metadata.get(_KEPT, ()))
        if text
    ]
    compaction = {"id": id, "type": "compaction", "encrypted_content": encoded(summary)}
    return msgspec.json.encode(
        {
            "id": f"resp_{stem}",
            "object": "response.compaction",
            "created_at": created,
            "output": [*kept, compaction],
            "usage": usage_body(total_usage(choice.finish for choice in choices)),
        }
    )


DIALECT = dataclasses.replace(
    RESPONSES,
    name="openai_compaction",
    path="/v1/responses/compact",
    read_summary=read_summary,
    parse=parse,
    fold=fold,
    id_prefix=_ID_PREFIX,
    preset=PresetFields(),
)
