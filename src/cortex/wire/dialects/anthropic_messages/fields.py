"""Fields of `POST /v1/messages`."""

from __future__ import annotations

from cortex.wire.fields.tables.shared import CACHE_SALT, SPECULATION
from cortex.wire.fields.tables.table import (
    FieldTable,
    Kind,
    Treatment,
    content,
    honoured,
    in_envelope,
    limit,
    rejected,
    tolerated,
)
from cortex.wire.preset import JsonFields, PresetFields, ReasoningEffort, object_in, write

_TOOLS = [{"name": "weather", "input_schema": {"type": "object"}}]

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        content("messages", [{"role": "user", "content": "other"}]),
        in_envelope("system", "be brief"),
        limit("max_tokens", 9, "required; 0: no tokens, the prompt is computed for later requests"),
        honoured("tools", _TOOLS),
        honoured("tool_choice", {"type": "any"}, tools=_TOOLS),
        honoured(
            "thinking",
            {"type": "enabled", "budget_tokens": 1024},
            "absent: no thinking; `enabled` needs a budget, without tools below `max_tokens`",
            max_tokens=2048,
        ),
        honoured("output_config", {"effort": "low"}, "`effort` and `format`"),
        honoured("output_format", {"type": "json_schema", "schema": {"type": "object"}}),
        honoured("temperature", 0.5),
        honoured("top_p", 0.5),
        honoured("top_k", 5),
        honoured("stop_sequences", ["END"]),
        in_envelope("stream", True),
        honoured("metadata", {"user_id": "u"}),
        SPECULATION,
        CACHE_SALT,
        tolerated("cache_control", {"type": "ephemeral"}, "prefixes are always cached"),
        tolerated("context_management", {"edits": []}, "the client compacts"),
        in_envelope(
            "service_tier", "standard_only", "`auto`: the class of the key; `standard_only`: at most the default one"
        ),
        tolerated("inference_geo", "eu"),
        tolerated("betas", ["x"]),
        tolerated("speed", "fast"),
        rejected("container", "c", "no container runs here; remove it", ""),
        rejected("mcp_servers", [{"url": "x"}], "MCP servers are called by the client here; remove it", []),
    ),
)

TOOLS = (
    Kind("custom", Treatment.HONOURED, "the default type of `/v1/messages`"),
    *(
        Kind(f"{family}_*", Treatment.HONOURED, "the model is shown the published schema")
        for family in ("bash", "text_editor", "memory", "computer")
    ),
)
"""Types of tools; `*` is a version. Others run on the vendor's servers."""

BLOCKS = (
    Kind("text", Treatment.HONOURED),
    Kind("image", Treatment.HONOURED, "base64, also in results of tools; see Pictures"),
    Kind("document", Treatment.HONOURED, "text only; PDF is rejected"),
    Kind("search_result", Treatment.HONOURED),
    Kind("tool_use", Treatment.HONOURED),
    Kind("tool_result", Treatment.HONOURED),
    Kind("thinking", Treatment.HONOURED),
    Kind("redacted_thinking", Treatment.TOLERATED, "encrypted for the vendor's models"),
)
"""Types of content blocks. Others are rejected."""


def _write_reasoning(fields: JsonFields, effort: ReasoningEffort) -> None:
    write(fields, "thinking", {"type": "disabled"} if effort == "none" else {"type": "adaptive"})
    if effort != "none":
        known = "low" if effort == "minimal" else effort
        write(fields, "output_config", {**object_in(fields, "output_config"), "effort": known})


PRESET = PresetFields(
    names={"stop": "stop_sequences", "max_completion_tokens": "max_tokens"},
    system="system",
    has_messages=True,
    write_reasoning=_write_reasoning,
)
