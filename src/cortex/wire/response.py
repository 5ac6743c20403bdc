"""A whole response, gathered from its events, for clients that did not request a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cortex.wire.error_encoding import from_code
from cortex.wire.errors import UpstreamInterrupted
from cortex.wire.events import (
    AnyEvent,
    Failure,
    Finish,
    Logprobs,
    PromptLogprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    TokenIds,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    Usage,
    UsageSoFar,
)
from cortex.wire.requests import Reasoning, Text, ToolCall

Block = Text | Reasoning | ToolCall


@dataclass(frozen=True, slots=True)
class ResponseChoice:
    """One finished choice with its blocks in order."""

    index: int
    blocks: tuple[Block, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Text))

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Reasoning))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(block for block in self.blocks if isinstance(block, ToolCall))


@dataclass(slots=True)
class _Gathering:
    """A choice while its events arrive. A block is its kind and the pieces of its text."""

    blocks: list[tuple[ToolCallStart | type[Text] | type[Reasoning], list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] = ()
    finish: Finish | None = None

    def add_text(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if not self.blocks or self.blocks[-1][0] is not kind:
            self.blocks.append((kind, []))
        self.blocks[-1][1].append(text)

    def done(self, index: int) -> ResponseChoice:
        if self.finish is None:
            raise UpstreamInterrupted("The response ended before it was complete; try again.")
        blocks = tuple(map(_block, self.blocks))
        return ResponseChoice(
            index,
            blocks,
            self.finish,
            tuple(self.logprobs),
            self.prompt_logprobs,
            tuple(self.token_ids),
            self.prompt_token_ids,
        )


def _block(gathered: tuple[ToolCallStart | type[Text] | type[Reasoning], list[str]]) -> Block:
    kind, pieces = gathered
    if isinstance(kind, ToolCallStart):
        return ToolCall(id=kind.id, name=kind.name, arguments="".join(pieces))
    return kind(text="".join(pieces))


def gather(events: Iterable[AnyEvent]) -> tuple[ResponseChoice, ...]:
    """The choices in order. Raises the error of a `Failure`, and `UpstreamInterrupted` if a choice has no `Finish`."""
    gathering: dict[int, _Gathering] = {}
    for event in events:
        choice = gathering.setdefault(event.index, _Gathering())
        match event:
            case ToolCallStop() | UsageSoFar():
                pass
            case Start(prompt_token_ids=tokens):
                choice.prompt_token_ids = tokens
            case TokenIds(tokens=tokens):
                choice.token_ids.extend(tokens)
            case PromptLogprobs(tokens=tokens):
                choice.prompt_logprobs = tokens
            case TextDelta(text=text):
                choice.add_text(Text, text)
            case ReasoningDelta(text=text):
                choice.add_text(Reasoning, text)
            case ToolCallStart():
                choice.blocks.append((event, []))
            case ToolCallDelta(arguments=arguments):
                choice.blocks[-1][1].append(arguments)
            case Logprobs(tokens=tokens):
                choice.logprobs.extend(tokens)
            case Finish():
                choice.finish = event
            case Failure(code=code, message=message):
                raise from_code(code, message)
    if not gathering:
        raise UpstreamInterrupted("The response ended before it began; try again.")
    return tuple(gathering[index].done(index) for index in sorted(gathering))


def total_usage(finishes: Iterable[Finish]) -> Usage:
    """Usage of all choices together."""
    return summed(finish.usage for finish in finishes)


def summed(usages: Iterable[Usage]) -> Usage:
    each = list(usages)
    return Usage(**{name: sum(getattr(usage, name) for usage in each) for name in Usage.__struct_fields__})
