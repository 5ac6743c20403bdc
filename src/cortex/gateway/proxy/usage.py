"""What an answer cost, read from its last bytes: every dialect reports usage at the end.

Nothing is decoded while a stream runs. A node that streams to a client which did not ask for usage says it
in an SSE comment before the last event, `: usage {…}`, that clients ignore.
"""

from __future__ import annotations

import msgspec

from cortex.wire.events import MAX_TOKENS, Tokens, Usage

USAGE_COMMENT = b"\n: usage "
_USAGE_KEY = b'"usage":'


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: Tokens | None = None
    reasoning_tokens: Tokens | None = None


class _Report(msgspec.Struct, frozen=True):
    """What OpenAI and Anthropic call the same numbers."""

    prompt_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


_decoder = msgspec.json.Decoder(_Report)
_NO_DETAILS = _Details()


def usage_in(tail: bytes) -> Usage | None:
    """The last usage report in `tail`, or None when there is none that can be believed: its cost is then estimated.

    A quote inside generated text is escaped, so it cannot be a report.
    """
    tail = b"\n" + tail  # a comment may be the first thing that a stream says
    end = len(tail)
    while (at := max(tail.rfind(_USAGE_KEY, 0, end), tail.rfind(USAGE_COMMENT, 0, end))) >= 0:
        brace = tail.find(b"{", at, at + 16)
        if brace >= 0:
            try:
                return _usage(_decoder.decode(_object_at(tail, brace)))
            except msgspec.DecodeError:
                return None
        end = at
    return None


def _object_at(text: bytes, start: int) -> bytes:
    """The JSON object that begins at `start`; its strings hold no braces. Shorter than whole when it is cut off."""
    end = start
    while (end := text.find(b"}", end) + 1) > 0:
        if text.count(b"{", start, end) == text.count(b"}", start, end):
            return text[start:end]
    return text[start:]


def _usage(report: _Report) -> Usage | None:
    """OpenAI counts cached tokens inside the prompt, Anthropic beside it. No response is made of no tokens at all."""
    prompt_details = report.prompt_tokens_details or report.input_tokens_details or _NO_DETAILS
    completion_details = report.completion_tokens_details or report.output_tokens_details or _NO_DETAILS
    beside = (report.cache_read_input_tokens or 0) + (report.cache_creation_input_tokens or 0)
    prompt_tokens = (report.prompt_tokens or report.input_tokens or 0) + beside
    if prompt_tokens > MAX_TOKENS or not (prompt_tokens or report.completion_tokens or report.output_tokens):
        return None
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_details.cached_tokens or report.cache_read_input_tokens or 0,
        completion_tokens=report.completion_tokens or report.output_tokens or 0,
        reasoning_tokens=completion_details.reasoning_tokens or 0,
    )
