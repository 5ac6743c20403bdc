"""What an answer cost, read from its last bytes: every dialect reports usage at the end.

Nothing is decoded while a stream runs. A node that streams to a client which did not ask for usage says it
in a closing SSE comment, `: usage {…}`, that clients ignore.
"""

from __future__ import annotations

import json
from typing import Any

from cortex.wire.events import Usage

USAGE_COMMENT = b"\n: usage "
_USAGE_KEY = b'"usage":'
_decoder = json.JSONDecoder()


def usage_in(tail: bytes) -> Usage | None:
    """The last usage report in `tail`, or None. A quote inside generated text is escaped, so it cannot be one."""
    end = len(tail)
    while (at := max(tail.rfind(_USAGE_KEY, 0, end), tail.rfind(USAGE_COMMENT, 0, end))) >= 0:
        brace = tail.find(b"{", at, at + 16)
        if brace >= 0:
            try:
                report, _ = _decoder.raw_decode(tail[brace:].decode("utf-8", "replace"))
            except ValueError:
                return None
            return _usage(report)
        end = at
    return None


def _usage(report: dict[str, Any]) -> Usage:
    """OpenAI counts cached tokens inside the prompt, Anthropic beside it."""
    prompt_details = report.get("prompt_tokens_details") or report.get("input_tokens_details") or {}
    completion_details = report.get("completion_tokens_details") or report.get("output_tokens_details") or {}
    beside = (report.get("cache_read_input_tokens") or 0) + (report.get("cache_creation_input_tokens") or 0)
    return Usage(
        prompt_tokens=(report.get("prompt_tokens") or report.get("input_tokens") or 0) + beside,
        cached_tokens=prompt_details.get("cached_tokens") or report.get("cache_read_input_tokens") or 0,
        completion_tokens=report.get("completion_tokens") or report.get("output_tokens") or 0,
        reasoning_tokens=completion_details.get("reasoning_tokens") or 0,
    )
