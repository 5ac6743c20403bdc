"""One choice of a response: from the engine's tokens to events. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from cortex.neuron.engine.request import StepOutput, TokenLogprobs
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.stops import StopScanner
from cortex.neuron.text.template.prompt import Rendered
from cortex.wire.errors import GenerationFailed, InvalidValue, Overloaded
from cortex.wire.events import (
    AnyEvent,
    Finish,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    Timing,
    TokenIds,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    Usage,
    UsageSoFar,
)
from cortex.wire.requests import GenerateRequest

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity; an impossible token is reported as very unlikely."""


@dataclass(frozen=True, slots=True)
class ChoiceContext:
    """Values shared by the choices of one response."""

    id: str
    created: int
    model: str
    request: GenerateRequest
    rendered: Rendered
    text: TextModel
    stop_token_ids: tuple[int, ...]
    num_predicted: int = 0
    """Tokens of the client's prediction."""


class Stopwatch:
    """Measures when a response began and the duration of its parts."""

    __slots__ = ("_arrived_s", "_first_s", "_gateway_s", "_submitted_s")

    def __init__(self, arrived_s: float, submitted_s: float, gateway_s: float = 0.0) -> None:
        """`gateway_s`: how long a gateway held the request back."""
        self._gateway_s = gateway_s
        self._arrived_s = arrived_s
        self._submitted_s = submitted_s
        self._first_s: float | None = None

    def note_output(self) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic()

    def note_whole(self) -> None:
        """The response arrived as a whole: all of its time counts as generation."""
        self._first_s = self._submitted_s

    def timing(self) -> Timing:
        """Until now."""
        now_s = time.monotonic()
        first_s = now_s if self._first_s is None else self._first_s
        return Timing(
            gateway_s=self._gateway_s,
            queue_s=self._submitted_s - self._arrived_s,
            prefill_s=first_s - self._submitted_s,
            decode_s=now_s - first_s,
        )


class Choice:
    """Outputs in, events out: detokenized, cut at stop strings, parsed. Owned by one request.

    Outputs after `ended` are ignored. An engine sequence that has not finished by then must be cancelled.
    """

    def __init__(self, context: ChoiceContext, index: int) -> None:
        self.index = index
        self.ended = False
        self.num_tokens = 0
        self.rendered = context.rendered
        """The prompt that it continues."""
        self._context = context
        self._detokenizer = context.text.detokenizer(context.request)
        self._stops = StopScanner(context.request.sampling.stop)
        self._parser = context.text.parser(context.request, context.rendered, index)
        self._stop_token_ids = frozenset(context.stop_token_ids)
        self._started = False
        self._thinking = context.rendered.starts_in_reasoning
        self._num_reasoning_tokens = 0
        self._num_cached_tokens = 0
        self._num_drafted = self._num_accepted = self._num_predicted = 0
        self._has_called = False
        request = context.request
        self._may_be_plain = not (
            request.sampling.stop
            or request.continuous_usage
            or request.timings
            or request.return_token_ids
            or request.thinking.inline
        ) and bool(request.tool_choice.parallel and request.sampling.max_tokens != 0)
        self._is_plain = False
        """Whether an output in the middle of the response needs only its text."""
        self._spellings: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._is_inside = False
        """Whether the text has begun reasoning that it shows inline."""
        self._untold: list[int] = []
        """Tokens whose ids are not in an event yet."""

    @property
    def usage(self) -> Usage:
        """Usage so far. The prompt, shared by `n` choices, counts for the first one, from its start."""
        accepted = min(self._num_predicted, self._context.num_predicted)
        counts_prompt = self.index % self._context.request.sampling.n == 0 and self._started
        return Usage(
            prompt_tokens=len(self._context.rendered.ids) if counts_prompt else 0,
            cached_tokens=self._num_cached_tokens if counts_prompt else 0,
            completion_tokens=self.num_tokens,
            reasoning_tokens=self._num_reasoning_tokens,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=self._context.num_predicted - accepted,
            drafted_tokens=self._num_drafted,
            accepted_draft_tokens=self._num_accepted,
        )

    def push(self, outputs: Sequence[StepOutput], stopwatch: Stopwatch) -> list[AnyEvent]:
        """Raises `GenerationFailed` or `Overloaded` when the engine ended the request by itself."""
        if self._is_plain and len(outputs) == 1 and _is_plain_token(outputs[0]):
            return self._next(outputs[0])
        stopwatch.note_output()
        events: list[AnyEvent] = []
        for output in chain.from_iterable(map(_token_by_token, outputs)):
            if self.ended:
                break
            events += self._take(output, stopwatch)
        tokens, self._untold = self._untold, []
        request = self._context.request
        if request.thinking.inline:
            events = self._inlined(events)
        place = 1 if events and isinstance(events[0], Start) else 0
        if events and (request.continuous_usage or request.timings):
            events.insert(place, UsageSoFar(index=self.index, usage=self.usage, timing=stopwatch.timing()))
        if tokens and request.return_token_ids:
            events.insert(place, TokenIds(index=self.index, tokens=tuple(tokens)))
        return _joined(events)

    def _inlined(self, events: Iterable[AnyEvent]) -> list[AnyEvent]:
        """Reasoning as text between tags."""
        made: list[AnyEvent] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                opening = "" if self._is_inside else "<think>\n"
                made.append(TextDelta(index=self.index, text=opening + event.text))
                self._is_inside = True
                continue
            if self._is_inside and isinstance(event, TextDelta | ToolCallStart | Finish):
                made.append(TextDelta(index=self.index, text="\n</think>\n\n"))
                self._is_inside = False
            made.append(event)
        return made

    def _next(self, output: StepOutput) -> list[AnyEvent]:
        """A fast path of `push` for the most common output: a token in the middle of a response that needs only
        text."""
        self._count(output)
        return self._parse(self._detokenizer.push(output.tokens), 1)

    def _count(self, output: StepOutput) -> None:
        self.num_tokens += len(output.tokens)
        if output.num_drafted or output.num_accepted or output.num_predicted:
            self._num_drafted += output.num_drafted
            self._num_accepted += output.num_accepted
            self._num_predicted += output.num_predicted

    def _take(self, output: StepOutput, stopwatch: Stopwatch) -> list[AnyEvent]:
        if output.finish == "error":
            raise GenerationFailed(output.error or "The engine gave no reason; see the node's log.")
        if output.finish == "rejected":
            raise InvalidValue(output.error or "The request contradicts itself.")
        if output.finish == "cancelled":
            raise Overloaded("The node cancelled this request; try again.")
        events: list[AnyEvent] = []
        if not self._started:
            events += self._start(output.cached_tokens or 0, output.prompt_logprobs)
        if self._context.request.sampling.max_tokens == 0:
            return [*events, *self._end("length", None, stopwatch.timing())]
        self._count(output)
        self._untold += output.tokens
        shown = self._shown(output)
        if shown and output.logprobs:
            events.append(Logprobs(index=self.index, tokens=self._logprobs(shown, output.logprobs)))
        text = self._detokenizer.push(shown)
        if output.finish is not None:
            text += self._detokenizer.flush()
        text, stop = self._stops.push(text)
        if output.finish is not None and stop is None:
            text += self._stops.flush()
        events += self._parse(text, len(output.tokens))
        if stop is not None:
            events += self._end("stop", stop, stopwatch.timing())
        elif output.finish is not None:
            events += self._end(output.finish, None, stopwatch.timing())
        return events if self._context.request.tool_choice.parallel else self._until_call(events, stopwatch)

    def _until_call(self, events: list[AnyEvent], stopwatch: Stopwatch) -> list[AnyEvent]:
        """The events up to the end of a complete call, with which a response without parallel calls ends."""
        for place, event in enumerate(events, start=1):
            if isinstance(event, ToolCallStop) and event.is_complete:
                self.ended = True
                timing = stopwatch.timing()
                return [*events[:place], Finish(index=self.index, reason="tool_calls", usage=self.usage, timing=timing)]
        return events

    def _shown(self, output: StepOutput) -> Sequence[int]:
        """The output's tokens without a final stop token, which is counted but not shown."""
        tokens = output.tokens
        if output.finish == "stop" and tokens and tokens[-1] in self._stop_token_ids:
            return tokens[:-1]
        return tokens

    def _start(self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs] = ()) -> list[AnyEvent]:
        self._started = True
        self._is_plain = self._may_be_plain
        context = self._context
        sampling = context.request.sampling
        self._num_cached_tokens = cached_tokens
        start = Start(
            index=self.index,
            id=context.id,
            model=context.model,
            created=context.created,
            prompt_tokens=len(context.rendered.ids),
            cached_tokens=self._num_cached_tokens,
            prompt_token_ids=tuple(context.rendered.ids) if context.request.return_token_ids else (),
        )
        events: list[AnyEvent] = [start]
        if sampling.prompt_logprobs is not None:
            tokens = self._prompt_logprobs(prompt_logprobs, sampling.prompt_logprobs)
            events.append(PromptLogprobs(index=self.index, tokens=tokens))
        if not context.request.echo:
            return events
        if sampling.logprobs:
            tokens = self._prompt_logprobs(prompt_logprobs, sampling.top_logprobs)
            events.append(Logprobs(index=self.index, tokens=tokens))
        if prompt := context.rendered.text or context.text.decode(context.rendered.ids):
            events.append(TextDelta(index=self.index, text=prompt))
        return events

    def _parse(self, text: str, num_tokens: int) -> list[AnyEvent]:
        events: list[AnyEvent] = list(self._parser.push(text)) if text else []
        self._note(events)
        if self._thinking:
            self._num_reasoning_tokens += num_tokens
        return events

    def _note(self, events: Iterable[AnyEvent]) -> None:
        """Tokens count as reasoning while the latest event is reasoning."""
        for event in events:
            self._thinking = isinstance(event, ReasoningDelta)
            if isinstance(event, ToolCallStart):
                self._has_called = True

    def _end(self, reason: FinishReason, stop_sequence: str | None, timing: Timing) -> list[AnyEvent]:
        self.ended, self._is_plain = True, False
        events: list[AnyEvent] = list(self._parser.finish(is_cut=reason == "length"))
        self._note(events)
        if self._parser.broke_off:
            # A client must not take an incomplete tool call for a complete one.
            reason, stop_sequence = "length", None
        elif reason == "stop" and self._has_called:
            reason = "tool_calls"
        finish = Finish(index=self.index, reason=reason, usage=self.usage, timing=timing, stop_sequence=stop_sequence)
        return [*events, finish]

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[TokenLogprob, ...]:
        return tuple(
            self._token(
                token,
                entry.logprob,
                tuple(self._token(*other) for other in zip(entry.top_ids, entry.top_logprobs, strict=True)),
            )
            for token, entry in zip(tokens, logprobs, strict=False)  # those of an end token are not shown
        )

    def _prompt_logprobs(self, entries: Sequence[TokenLogprobs], num_top: int) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of prompt tokens. The first has none; control tokens before the text are left out."""
        rendered, tokenizer = self._context.rendered, self._context.text.tokenizer
        tokens: list[TokenLogprob] = []
        is_before = bool(rendered.text)
        for token_id, entry in zip(rendered.ids, (None, *entries), strict=True):
            text, spelled = self._spelling(token_id)
            is_before = is_before and token_id in tokenizer.special_ids and not rendered.text.startswith(text)
            logprob = None if entry is None else max(entry.logprob, _LEAST_LOGPROB)
            top = () if entry is None else zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
            tops = tuple(self._token(*other) for other in top)
            shown = () if is_before else spelled
            tokens.append(TokenLogprob(text, token_id, logprob, shown, tops, entry.rank if entry else None))
        return tuple(tokens)

    def _token(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text, spelled = self._spelling(token_id)
        return TokenLogprob(text, token_id, max(logprob, _LEAST_LOGPROB), spelled, top)

    def _spelling(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """The text and the bytes of a token. Top tokens are few, and repeat at every position."""
        if (known := self._spellings.get(token_id)) is not None:
            return known
        spelled = self._context.text.tokenizer.token_bytes(token_id)
        self._spellings[token_id] = made = (spelled.decode("utf-8", "replace"), tuple(spelled))
        return made


def _is_plain_token(output: StepOutput) -> bool:
    return len(output.tokens) == 1 and output.finish is None and not output.logprobs


def _token_by_token(output: StepOutput) -> Sequence[StepOutput]:
    """One output per token of a step that accepted drafts, because the response or its reasoning may end with any of
    them."""
    last = len(output.tokens) - 1
    if last < 1:
        return (output,)
    return [
        output._replace(
            tokens=output.tokens[place : place + 1],
            logprobs=output.logprobs[place : place + 1],
            finish=output.finish if place == last else None,
            prompt_logprobs=() if place else output.prompt_logprobs,
            num_drafted=0 if place else output.num_drafted,
            num_accepted=int(place < output.num_accepted),
            num_predicted=int(place < output.num_predicted),
        )
        for place in range(last + 1)
    ]


def _joined(events: list[AnyEvent]) -> list[AnyEvent]:
    """Joins adjacent deltas of one kind: what accumulated while the client was slow becomes one write."""
    if len(events) < 2:
        return events
    joined: list[AnyEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(index=event.index, text=last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(index=event.index, text=last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta):
            joined[-1] = ToolCallDelta(index=event.index, call=event.call, arguments=last.arguments + event.arguments)
        else:
            joined.append(event)
    return joined
