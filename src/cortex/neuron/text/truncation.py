"""Makes a conversation that exceeds the context fit by dropping its oldest messages, where the client allows that."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import msgspec

from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import PromptRules, Rendered
from cortex.wire.errors import ContextLengthExceeded
from cortex.wire.prompt_overflow import prompt_too_long
from cortex.wire.requests import GenerateRequest, Message

ROOM_FOR_RESPONSE = 1024
"""Tokens that a shortened prompt leaves for a response without a limit; at most a quarter of the context."""


def render_within(text: TextModel, request: GenerateRequest, rules: PromptRules) -> tuple[GenerateRequest, Rendered]:
    """The request with as many of its latest messages as fit, and its prompt. Unchanged if the whole prompt fits.

    Instructions at the beginning stay. A conversation is cut before a user's turn, or within the last turn if that is
    too long by itself, but never between a tool's call and its result. Raises what `TextModel.render` raises, and
    ContextLengthExceeded when not even the last messages fit.
    """
    context_tokens = rules.context_tokens
    if not request.truncate or context_tokens is None:
        return request, text.render(request, rules)
    most = min(context_tokens - 1, rules.max_prompt_tokens or context_tokens)

    def rendered(candidate: GenerateRequest) -> Rendered | None:
        try:
            return text.render(candidate, rules)
        except ContextLengthExceeded:
            return None

    whole = rendered(request)
    if whole is not None and len(whole.ids) <= most:
        return request, whole
    room = min(request.sampling.max_tokens or ROOM_FOR_RESPONSE, context_tokens // 4)
    shortened = [msgspec.structs.replace(request, messages=messages) for messages in _shorter(request.messages)]

    def num_tokens(candidate: GenerateRequest) -> int:
        prompt = rendered(candidate)
        return context_tokens if prompt is None else len(prompt.ids)

    chosen = _first_within(shortened, num_tokens, min(most, context_tokens - room))
    if chosen is None:  # the last messages may still fit with less room
        chosen = shortened[-1] if shortened else request
    prompt = text.render(chosen, rules)
    if len(prompt.ids) > most:
        raise prompt_too_long(len(prompt.ids), context_tokens, rules.max_prompt_tokens)
    return chosen, prompt


def _shorter(messages: tuple[Message, ...]) -> list[tuple[Message, ...]]:
    """The conversation without its oldest messages: ever fewer, each one longer than the next."""
    start = next((at for at, message in enumerate(messages) if message.role not in ("system", "developer")), 0)
    leading, rest = messages[:start], messages[start:]
    turns = [at for at, message in enumerate(rest) if message.role == "user" and at > 0]
    last_turn = turns[-1] if turns else 0
    within = [at for at, message in enumerate(rest) if message.role == "assistant" and at > last_turn]
    return [(*leading, *rest[at:]) for at in (*turns, *within)]


def _first_within(
    candidates: list[GenerateRequest], num_tokens: Callable[[GenerateRequest], int], limit: int
) -> GenerateRequest | None:
    """The first candidate with at most `limit` tokens. They get shorter, so few of them have to be rendered."""
    at = bisect_left(candidates, -limit, key=lambda candidate: -num_tokens(candidate))
    return candidates[at] if at < len(candidates) else None
