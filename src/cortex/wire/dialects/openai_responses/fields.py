"""Fields of `POST /v1/responses`."""

from __future__ import annotations

from cortex.wire.fields.tables.shared import EXTENSIONS, OUTPUT, PROMPT, SAMPLING, TIER
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

_TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]

OF_GATEWAYS = {
    "store": "of `/v1/responses` by a gateway",
    "previous_response_id": "by a gateway that stores responses; a node rejects it",
    "background": "by a gateway that stores responses; a node rejects it",
    "conversation": "by a gateway that stores responses; a node rejects it",
}
"""Fields that a gateway honours, with their notes. `FIELDS` has a node's treatment of them."""

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        content("input", "other"),
        in_envelope("instructions", "be brief"),
        honoured("tools", _TOOLS),
        honoured("tool_choice", "required", tools=_TOOLS),
        honoured("parallel_tool_calls", False),
        limit("max_output_tokens", 9),
        honoured("top_logprobs", 2),
        honoured("include", ["message.output_text.logprobs"], "log-probabilities; others have nothing to add"),
        honoured("text", {"format": {"type": "json_object"}}),
        tolerated("text.verbosity", "low", "a hint that open models do not know"),
        honoured("prediction", {"type": "content", "content": "x"}, "as in chat completions"),
        honoured("reasoning", {"effort": "low"}),
        honoured("reasoning.summary", "auto", "`auto`, `concise`, `detailed`: the reasoning itself, as a summary"),
        honoured("chat_template_kwargs", {"enable_thinking": False}),
        in_envelope("stream", True),
        tolerated(
            "stream_options", {"include_obfuscation": False}, "nothing is obfuscated; only with `stream`", stream=True
        ),
        honoured("user", "u"),
        honoured("metadata", {"k": "v"}, "repeated in the response"),
        TIER,
        honoured("safety_identifier", "s", "repeated in the response"),
        honoured("prompt_cache_key", "k", "repeated in the response"),
        honoured("max_tool_calls", 3, "repeated in the response; it concerns tools that run on a server"),
        honoured("truncation", "auto", "drops the oldest turns of a conversation that exceeds the context"),
        tolerated("prompt_cache_retention", "24h"),
        tolerated("store", True, "a gateway stores the response; a node does not"),
        tolerated("client_metadata", {"k": "v"}),
        tolerated("context_management", [{"type": "compaction"}], "the client compacts"),
        rejected(
            "previous_response_id", "resp_1", "a gateway stores responses; send the whole conversation in 'input'"
        ),
        rejected("conversation", "conv_1", "a gateway stores conversations; send the whole conversation in 'input'"),
        rejected("prompt", {"id": "pmpt_1"}, "prompts are not stored; send the whole conversation in 'input'"),
        rejected("background", True, "only a gateway stores responses; use 'stream' for long ones", False),
        rejected("return_token_ids", True, "token ids are not returned here; use chat completions", False),
        rejected("n", 2, "this dialect has one response; use chat completions", 1),
    ),
    (tolerated("timings_per_token", True),),
    SAMPLING,
    OUTPUT,
    PROMPT,
    EXTENSIONS,
    of_gateways=OF_GATEWAYS,
)

TOOLS = (
    Kind("function", Treatment.HONOURED),
    Kind("custom", Treatment.HONOURED, "free text; a grammar is shown to the model and not enforced"),
    Kind("namespace", Treatment.HONOURED, "its functions and custom tools; calls have `name` and `namespace`"),
    Kind("local_shell", Treatment.HONOURED, "calls are `local_shell_call` items"),
    Kind("shell", Treatment.HONOURED, "of the client's machine; calls are `shell_call` items"),
    Kind("apply_patch", Treatment.HONOURED, "calls are `apply_patch_call` items"),
)
"""Types of tools. Others run on the vendor's servers."""

ITEMS = (
    Kind("message", Treatment.HONOURED),
    Kind("reasoning", Treatment.HONOURED, "its text, else its summary; encrypted content cannot be read"),
    Kind("function_call", Treatment.HONOURED),
    Kind("function_call_output", Treatment.HONOURED),
    Kind("custom_tool_call", Treatment.HONOURED),
    Kind("custom_tool_call_output", Treatment.HONOURED),
    *(
        Kind(f"{shape}_call{end}", Treatment.HONOURED)
        for shape in ("local_shell", "shell", "apply_patch")
        for end in ("", "_output")
    ),
    Kind("compaction", Treatment.HONOURED, "of `/v1/responses/compact` here: the model sees the summary"),
    Kind("web_search_call", Treatment.TOLERATED, "the message after it has the result; reported in the header"),
    Kind("mcp_list_tools", Treatment.TOLERATED, "a list without effect; reported in the header"),
)
"""Types of input items. Others are rejected."""

ITEMS_OF_GATEWAYS = (Kind("item_reference", Treatment.HONOURED, "by a gateway, which puts the stored item there"),)
"""Types of input items that only a gateway accepts."""


def _write_reasoning(fields: JsonFields, effort: ReasoningEffort) -> None:
    write(fields, "reasoning", {**object_in(fields, "reasoning"), "effort": effort})


PRESET = PresetFields(
    names={"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
    system="instructions",
    write_reasoning=_write_reasoning,
)
