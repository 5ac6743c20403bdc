"""The usage of a response, from what its node sent.

Our own nodes send a typed report (`wire/node/usage_report.py`). Foreign servers report usage only in their dialect, at
the end of the body; its last bytes are searched once the response is complete.
"""

from __future__ import annotations

import msgspec

from cortex.wire.events import MAX_TOKENS, Tokens, Usage
from cortex.wire.node import usage_report

_USAGE_KEY = b'"usage":'


def reported_usage(header: bytes | None, tail: bytes, is_foreign: bool) -> Usage | None:
    """The usage that a response reports; None when it reports none, or none that can be true.

    `header` is the response's `usage_report.HEADER`, `tail` the end of its body.
    """
    if header is not None:
        return usage_report.from_header(header)
    usage = usage_report.from_stream(tail)
    return usage_in_dialect(tail) if usage is None and is_foreign else usage


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: Tokens | None = None
    reasoning_tokens: Tokens | None = None


class _Fields(msgspec.Struct, frozen=True):
    """A usage object of OpenAI or Anthropic."""

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


_decoder = msgspec.json.Decoder(_Fields)
_NO_DETAILS = _Details()


def usage_in_dialect(tail: bytes) -> Usage | None:
    """The last usage object in `tail`, in the fields of OpenAI or Anthropic; None when there is none that can be true.

    Generated text cannot pass for one, because quotes in it are escaped.
    """
    end = len(tail)
    while (at := tail.rfind(_USAGE_KEY, 0, end)) >= 0:
        brace = tail.find(b"{", at, at + 16)
        if brace >= 0:
            try:
                return _usage(_decoder.decode(_object_at(tail, brace)))
            except msgspec.DecodeError:
                return None
        end = at
    return None


def _object_at(text: bytes, start: int) -> bytes:
    """The JSON object that begins at `start`, whose strings contain no braces; the rest of `text` if it is cut off."""
    end = start
    while (end := text.find(b"}", end) + 1) > 0:
        if text.count(b"{", start, end) == text.count(b"}", start, end):
            return text[start:end]
    return text[start:]


def _usage(fields: _Fields) -> Usage | None:
    """`fields` as `Usage`; None when no response can have used that: nothing, or more than `MAX_TOKENS`.

    OpenAI counts cached tokens as part of the prompt, Anthropic counts them separately.
    """
    prompt_details = fields.prompt_tokens_details or fields.input_tokens_details or _NO_DETAILS
    completion_details = fields.completion_tokens_details or fields.output_tokens_details or _NO_DETAILS
    separate = (fields.cache_read_input_tokens or 0) + (fields.cache_creation_input_tokens or 0)
    prompt_tokens = (fields.prompt_tokens or fields.input_tokens or 0) + separate
    if prompt_tokens > MAX_TOKENS or not (prompt_tokens or fields.completion_tokens or fields.output_tokens):
        return None
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_details.cached_tokens or fields.cache_read_input_tokens or 0,
        completion_tokens=fields.completion_tokens or fields.output_tokens or 0,
        reasoning_tokens=completion_details.reasoning_tokens or 0,
    )
