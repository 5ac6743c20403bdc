"""Shared by OpenAI's chat and completions dialects: the frame of a streamed chunk, usage, prompt scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from cortex import __version__
from cortex.wire.error_encoding import OPENAI
from cortex.wire.errors import CortexError
from cortex.wire.events import Finish, Logprobs, Timing, TokenIds, TokenLogprob, Usage, UsageSoFar
from cortex.wire.fields.request_class import tier_of
from cortex.wire.requests import GenerateRequest
from cortex.wire.response import summed, total_usage
from cortex.wire.sse import frame

_MARK = "\ufdd0text\ufdd0"
_encode_text = msgspec.json.Encoder().encode
DONE = frame(b"[DONE]")
SYSTEM_FINGERPRINT = f"fp_cortex_{__version__}"
"""With the same fingerprint, the same request with a seed gives the same response."""


def stream_error(error: CortexError) -> bytes:
    """The last frame of a stream that failed."""
    return frame(msgspec.json.encode(OPENAI.envelope(error)))


def served_tier(request: GenerateRequest) -> dict[str, str]:
    """The service tier of a request that names one."""
    return {"service_tier": tier_of(request.request_class or "default")} if request.echoes_tier else {}


class ChunkEncoder(ABC):
    """Choices to chunks. The usage chunk and `[DONE]` follow the finish of the last choice."""

    def __init__(self, kind: str, request: GenerateRequest, *, id: str, created: int, model: str) -> None:
        head = {
            "id": id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            **served_tier(request),
        }
        self._head = msgspec.json.encode(head)[:-1] + b',"choices":'
        """The beginning of every chunk, encoded once."""
        self._include_usage = request.include_usage
        self._continuous: dict[int, Usage] = {}
        """The latest usage of each choice, for clients that want it in every chunk."""
        self._is_continuous, self._is_timed = request.continuous_usage, request.timings
        self._timings: dict[str, float] | None = None
        """The latest, for the next chunk."""
        self._open_choices = request.num_choices
        self._finishes: list[Finish] = []
        self._logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        """Those that wait for the next chunk of their choice."""
        self._returns_ids = request.return_token_ids
        self._token_ids: dict[int, tuple[int, ...]] = {}
        """The same of token ids."""
        self._frames: dict[tuple[int, str], tuple[bytes, bytes]] = {}
        """By choice and field: what is before and after the text of a chunk that has nothing else."""

    @abstractmethod
    def _whole_text_chunk(self, index: int, field: str, text: str) -> bytes:
        """The chunk of a choice with `text` in `field`, and with all pending fields."""

    def _text_chunk(self, index: int, field: str, text: str) -> bytes:
        """As `_whole_text_chunk`. Most chunks differ in nothing but the text, so the rest is encoded once."""
        if self._logprobs or self._returns_ids or self._continuous or self._is_timed:
            return self._whole_text_chunk(index, field, text)
        frame = self._frames.get((index, field))
        if frame is None:
            before, _, after = self._whole_text_chunk(index, field, _MARK).rpartition(_encode_text(_MARK))
            frame = self._frames[index, field] = (before, after)
        return frame[0] + _encode_text(text) + frame[1]

    def _ids(self, index: int) -> dict[str, Any]:
        """The fields of a choice's chunk with the tokens that wait for it."""
        return {"token_ids": self._token_ids.pop(index, None)} if self._returns_ids else {}

    def _chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, prompt: Sequence[int] = ()
    ) -> bytes:
        """`prompt`: token ids that the chunk itself has."""
        chunk = self._head + msgspec.json.encode(choices)
        if prompt:
            chunk += b',"prompt_token_ids":' + msgspec.json.encode(prompt)
        if self._continuous and usage is None:
            usage = usage_body(summed(self._continuous.values()))
        if self._include_usage or usage is not None:
            chunk += b',"usage":' + msgspec.json.encode(usage)
        if self._timings is not None:
            chunk += b',"timings":' + msgspec.json.encode(self._timings)
        return frame(chunk + b"}")

    def _note(self, event: UsageSoFar | Finish | TokenIds | Logprobs) -> bytes:
        """Keep what is part of the chunks that follow; the event has none of its own."""
        if isinstance(event, TokenIds):
            self._token_ids[event.index] = self._token_ids.get(event.index, ()) + event.tokens
            return b""
        if isinstance(event, Logprobs):
            self._logprobs[event.index] = self._logprobs.get(event.index, ()) + event.tokens
            return b""
        if self._is_continuous and isinstance(event, UsageSoFar):
            self._continuous[event.index] = event.usage
        if self._is_timed:
            self._timings = timings_body(event.usage, event.timing)
        return b""

    def _finished(self, event: Finish, chunk: bytes) -> bytes:
        """The last `chunk` of a choice, and after that of the last one the end of the stream."""
        self._finishes.append(event)
        if len(self._finishes) < self._open_choices:
            return chunk
        if self._include_usage:
            chunk += self._chunk([], usage_body(total_usage(self._finishes)))
        return chunk + DONE


def timings_body(usage: Usage, timing: Timing) -> dict[str, float]:
    """As llama.cpp writes them."""
    num_read = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        **_timings("prompt", num_read, timing.prefill_s),
        **_timings("predicted", usage.completion_tokens, timing.decode_s),
    }


def _timings(phase: str, num_tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{phase}_n": num_tokens,
        f"{phase}_ms": seconds * 1000,
        f"{phase}_per_token_ms": seconds * 1000 / num_tokens if num_tokens else 0.0,
        f"{phase}_per_second": num_tokens / seconds if seconds else 0.0,
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": output_details(usage),
    }


def output_details(usage: Usage) -> dict[str, int]:
    """Those of a prediction only if the client sent one."""
    details = {"reasoning_tokens": usage.reasoning_tokens}
    accepted, rejected = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
    if accepted or rejected:
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return details


def prompt_logprobs_body(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """As vLLM writes them: for each token, by id, its own entry and those of the top tokens."""
    return [None if token.logprob is None else _prompt_token_body(token) for token in tokens]


def _prompt_token_body(token: TokenLogprob) -> dict[str, Any]:
    ranked = {other.token_id: (other, rank) for rank, other in enumerate(token.top, start=1)}
    ranked[token.token_id] = (token, token.rank or 1)
    return {
        str(token_id): {"logprob": one.logprob, "rank": rank, "decoded_token": one.token}
        for token_id, (one, rank) in ranked.items()
    }
