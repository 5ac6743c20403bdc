"""Fields of Ollama's `POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

import dataclasses
from typing import Final

from cortex.wire.fields.tables.shared import CACHE_SALT
from cortex.wire.fields.tables.table import FieldTable, content, honoured, in_envelope, limit, rejected, tolerated
from cortex.wire.preset import JsonFields, PresetFields, ReasoningEffort, write

_OPTIONS = (
    limit("options.num_predict", 9, "-1 and -2: no limit; 0 computes the prompt alone"),
    honoured("options.temperature", 0.5),
    honoured("options.top_k", 5),
    honoured("options.top_p", 0.5),
    honoured("options.min_p", 0.1),
    honoured("options.seed", 7),
    honoured("options.stop", ["END"]),
    honoured("options.repeat_penalty", 1.1),
    honoured("options.repeat_last_n", 64, "-1: all tokens; 0: no `repeat_penalty`"),
    honoured("options.presence_penalty", 0.5),
    honoured("options.frequency_penalty", 0.5),
    honoured("options.speculation", "off", "one token per step; the response is the same"),
    honoured("options.num_ctx", 512, "a cap; a gateway reloads an idle model that has less context, if memory allows"),
    tolerated("options.num_keep", 4, "nothing is truncated in silence"),
    tolerated("options.num_batch", 512, "the engine decides"),
    tolerated("options.num_gpu", 99, "placement decides"),
    tolerated("options.main_gpu", 0, "placement decides"),
    tolerated("options.num_thread", 8, "the engine decides"),
    tolerated("options.numa", False, "the engine decides"),
    tolerated("options.low_vram", False, "the engine decides"),
    tolerated("options.use_mmap", True, "the engine decides"),
    tolerated("options.use_mlock", False, "the engine decides"),
)
"""Other options are ignored, and the response lists them like fields that are not known."""

_SHARED = (
    in_envelope("model", "other"),
    in_envelope("stream", False, "`true` if absent"),
    honoured("format", "json", "`json` or a schema"),
    honoured("think", "low", "`true`, `false`, `low`, `medium`, `high` or `max`"),
    in_envelope(
        "keep_alive", 0, "0 unloads the model after the response; others keep it up to `eviction.max_keep_alive_s`"
    ),
    honoured("logprobs", True),
    honoured("top_logprobs", 2, logprobs=True),
    CACHE_SALT,
    tolerated("shift", True, "a response ends at the end of the context"),
    *_OPTIONS,
)

OPTIONS = frozenset(one.name.removeprefix("options.") for one in _OPTIONS)

CHAT = FieldTable(
    _SHARED,
    (
        content(
            "messages",
            [{"role": "user", "content": "other"}],
            "none: the model is loaded; a role that is not known is shown as `user`",
        ),
        honoured("tools", [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]),
        honoured("truncate", True, "drops the oldest messages of a prompt that does not fit; absent: it is rejected"),
    ),
)

GENERATE = FieldTable(
    _SHARED,
    (
        content("prompt", "other", "none: the model is loaded"),
        in_envelope("system", "You are brief."),
        content("images", ["iVBORw0KGgo="]),
        honoured("raw", True, "the prompt as it is, without the model's template"),
        tolerated("truncate", False, "a prompt that does not fit is rejected"),
        in_envelope("suffix", "x", "fills in before it; for models with the capability `insert`"),
        rejected("template", "x", "a model's own template is always used; remove it", ""),
        rejected("context", [1], "earlier turns are not sent as tokens; send them to /api/chat", []),
    ),
)

_THINK: Final = {"none": False, "minimal": "low", "xhigh": "max"}


def _write_reasoning(fields: JsonFields, effort: ReasoningEffort) -> None:
    write(fields, "think", _THINK.get(effort, effort))


CHAT_PRESET = PresetFields(
    names={
        "max_tokens": "num_predict",
        "max_completion_tokens": "num_predict",
        "repetition_penalty": "repeat_penalty",
        "repetition_window": "repeat_last_n",
    },
    options=OPTIONS,
    has_messages=True,
    write_reasoning=_write_reasoning,
)
GENERATE_PRESET = dataclasses.replace(CHAT_PRESET, system="system", has_messages=False)
