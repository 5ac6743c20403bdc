"""Fields of `POST /v1/chat/completions`."""

from __future__ import annotations

from cortex.wire.fields.tables.shared import ACCOUNT, EXTENSIONS, OUTPUT, PROMPT, SAMPLING, STREAM
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
from cortex.wire.preset import JsonFields, PresetFields, ReasoningEffort, write

_WEATHER = {"name": "weather", "parameters": {"type": "object"}}
_TOOLS = [{"type": "function", "function": _WEATHER}]

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        content("messages", [{"role": "user", "content": "other"}]),
        content("tools", _TOOLS, in_envelope=False),
        honoured("tool_choice", "required", tools=_TOOLS),
        honoured("parallel_tool_calls", False),
        honoured("functions", [_WEATHER], "the former name of `tools`; the response has `function_call`"),
        honoured("function_call", "none", "the former name of `tool_choice`", functions=[_WEATHER]),
        limit("max_tokens", 9, "-1 is no limit, as in llama.cpp"),
        limit("max_completion_tokens", 9, "takes precedence over `max_tokens`"),
        limit("n_predict", 9, "llama.cpp's name for `max_tokens`; -1 is no limit, 0 computes the prompt alone"),
        in_envelope("n", 2),
        honoured("logprobs", True),
        honoured("top_logprobs", 2, logprobs=True),
        honoured("prompt_logprobs", 1, "vLLM; not in a stream"),
        honoured("return_token_ids", True, "vLLM: `token_ids` of choices, and `prompt_token_ids`"),
        honoured("response_format", {"type": "json_object"}),
        honoured("reasoning_effort", "low"),
        honoured("enable_thinking", False),
        honoured("include_reasoning", False, "leaves the reasoning out of the response"),
        honoured("chat_template_kwargs", {"enable_thinking": False}),
        honoured("add_generation_prompt", False),
        honoured("continue_final_message", True),
        honoured("user", "u"),
        tolerated("verbosity", "low", "a hint that open models do not know"),
        honoured("prediction", {"type": "content", "content": "x"}, "text that the response repeats comes faster"),
        tolerated("add_special_tokens", False, "the template writes the special tokens"),
        rejected("modalities", ["text", "audio"], "the models here write text only", ["text"]),
        rejected("audio", {"voice": "x"}, "the models here write text only; remove it", {}),
        rejected("web_search_options", {"search_context_size": "low"}, "no search runs here; remove it"),
        rejected("chat_template", "x", "a model's own template is always used; remove it", ""),
        rejected("documents", [{"text": "x"}], "documents are not given to templates; put them into a message", []),
        rejected("echo", True, "the prompt is not repeated; remove it", False),
        honoured("separate_reasoning", False, "SGLang: as `reasoning_format` of `none`"),
        honoured("reasoning_format", "none", "llama.cpp: `none` leaves reasoning in the content, in `<think>`"),
        honoured("thinking_budget_tokens", 512, "llama.cpp: most tokens of reasoning; -1 is no limit"),
        rejected("mm_processor_kwargs", {"a": 1}, "pictures are processed as the model's files say; remove it", {}),
    ),
    STREAM,
    SAMPLING,
    OUTPUT,
    PROMPT,
    ACCOUNT,
    EXTENSIONS,
)

TOOLS = (
    Kind("function", Treatment.HONOURED),
    Kind("custom", Treatment.HONOURED, "free text; a grammar is shown to the model and not enforced"),
)
"""Types of tools. Others run on the vendor's servers."""


def _write_reasoning(fields: JsonFields, effort: ReasoningEffort) -> None:
    for other in ("enable_thinking", "thinking_budget_tokens"):
        fields.pop(other, None)
    write(fields, "reasoning_effort", effort)


PRESET = PresetFields(has_messages=True, write_reasoning=_write_reasoning)
