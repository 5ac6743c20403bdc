"""The event stream of a response. Codecs encode these events in a dialect.

Order, per choice: `Start`, then any number of blocks, then `Finish` or `Failure`. A block is a run of
`TextDelta`, a run of `ReasoningDelta`, or `ToolCallStart … ToolCallDelta* … ToolCallStop`; blocks never
interleave within a choice. `index` is the choice (0 unless `n > 1`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

MAX_TOKENS = 2**31 - 1
"""Above any real usage; a larger report is discarded."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the events; `index` is the choice."""

    index: int = 0


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    token_id: int
    logprob: float | None
    """None for the first token of a prompt, which has no prediction."""
    bytes: tuple[int, ...]
    """Its part of the text; empty for a control token before a prompt's text."""
    top: tuple[TokenLogprob, ...] = ()
    rank: int | None = None
    """For a token of the prompt: 1 if it is the top token."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Always counted, whether or not the client asked. `cached` is part of `prompt`, `reasoning` of `completion`."""

    prompt_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    reasoning_tokens: Tokens = 0
    accepted_prediction_tokens: Tokens = 0
    """Tokens of the client's prediction that appear in the response, and those that do not."""
    rejected_prediction_tokens: Tokens = 0
    drafted_tokens: Tokens = 0
    """Draft tokens that were checked, and those that were accepted."""
    accepted_draft_tokens: Tokens = 0
    queued_ms: Tokens = 0
    """How long its choices waited for a slot of the model, at the node."""
    energy_mj: Tokens = 0
    """Energy of its choices in millijoules: their share of what the model's devices drew meanwhile. 0 if unreadable."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    gateway_s: float = 0.0
    """Before a gateway sent the request to the node: the queue there, and loads."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def with_reported(self, reported: Timing) -> Timing:
        """This timing, measured from outside, corrected by the durations that the server reported; the rest counts as
        waiting in the server. Unchanged without such a report."""
        spent_s = self.prefill_s + self.decode_s
        waited_s = spent_s - reported.prefill_s - reported.decode_s
        if waited_s == spent_s or waited_s < 0:
            return self
        queue_s = self.queue_s + waited_s
        return msgspec.structs.replace(reported, gateway_s=self.gateway_s, queue_s=queue_s)


class Start(Event, frozen=True, tag="start"):
    """The request was admitted. `prompt_tokens` is known before the first token."""

    id: str
    model: str
    created: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    """If the client asked for them."""


class TextDelta(Event, frozen=True, tag="text"):
    text: str


class ReasoningDelta(Event, frozen=True, tag="reasoning"):
    text: str


class ToolCallStart(Event, frozen=True, tag="tool_start"):
    call: int
    """Dense index of the call within its choice."""
    id: str
    name: str


class ToolCallDelta(Event, frozen=True, tag="tool_delta"):
    call: int
    arguments: str
    """The next piece of the arguments' JSON text."""


class ToolCallStop(Event, frozen=True, tag="tool_stop"):
    call: int
    is_complete: bool = True
    """False for a call cut off by the end of the response."""


class Logprobs(Event, frozen=True, tag="logprobs"):
    """Log-probabilities of the tokens whose text begins in the next delta of the choice."""

    tokens: tuple[TokenLogprob, ...]


class PromptLogprobs(Event, frozen=True, tag="prompt_logprobs"):
    """Log-probabilities of every token of the choice's prompt, after its `Start`, if the client asked for them."""

    tokens: tuple[TokenLogprob, ...]


class TokenIds(Event, frozen=True, tag="token_ids"):
    """Tokens that were generated for the next events of the choice, if the client asked for them."""

    tokens: tuple[int, ...]


class UsageSoFar(Event, frozen=True, tag="usage"):
    """Usage of the choice including the next delta, and the time so far, if the client asked for either."""

    usage: Usage
    timing: Timing = Timing()


class Finish(Event, frozen=True, tag="finish"):
    """The end of one choice. `usage` counts this choice; the prompt is counted once, in choice 0."""

    reason: FinishReason
    usage: Usage
    timing: Timing = Timing()
    stop_sequence: str | None = None
    """The stop string that ended the choice, if one did."""


class Failure(Event, frozen=True, tag="failure"):
    """The request failed after it had started."""

    code: str
    message: str


AnyEvent = (
    Start
    | TextDelta
    | ReasoningDelta
    | ToolCallStart
    | ToolCallDelta
    | ToolCallStop
    | Logprobs
    | PromptLogprobs
    | UsageSoFar
    | TokenIds
    | Finish
    | Failure
)
