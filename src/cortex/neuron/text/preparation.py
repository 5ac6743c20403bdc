"""Turns a client's request into tokens and a grammar for the engine.

It takes time and memory that grow with the client's text, so it runs in a process of its own, within limits. The
request travels there packed, and the daemon keeps only what it needs later: never the conversation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import PromptRules, Rendered
from cortex.wire.errors import ContextLengthExceeded, InvalidValue, prompt_too_long
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
    """The conversation without more and more of its oldest messages, longest first."""
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the engine."""

    prompts: tuple[Rendered, ...]
    """One for each prompt of the request."""
    grammar: str | None = None
    """Constrains the output; None: no constraint."""
    response_grammar: str | None = None
    """Constrains the output after reasoning that the client's budget has ended."""
    prediction: tuple[int, ...] = ()
    """The text that the client expects."""


def prepare(text: TextModel, request: GenerateRequest, rules: PromptRules) -> Prepared:
    """Raises a CortexError for a request that the model cannot run, or that breaks `rules`."""
    rules = _capped(rules, request.most_context_tokens)
    fitting = [_fitting(text, single, rules) for single in request.one_per_prompt]
    request, prompts = fitting[0][0], tuple(prompt for _, prompt in fitting)
    grammar = text.grammar(request, rules)
    has_budget = text.reasoning_budget(request) is not None and text.may_reason(request)
    response_grammar = text.response_grammar(request, rules) if has_budget else None
    return Prepared(prompts, grammar, response_grammar, _prediction(text, request.prediction or "", rules))


def _prediction(text: TextModel, prediction: str, rules: PromptRules) -> tuple[int, ...]:
    if not prediction:
        return ()
    # Not the error of a long prompt: clients would shorten the conversation, which does not help.
    if rules.max_characters is not None and len(prediction) > rules.max_characters:
        raise InvalidValue(
            f"Invalid value for 'prediction': it has {len(prediction)} characters, at most {rules.max_characters} are "
            "allowed on this node (text.max_prompt_mb in neuron.toml). Send a shorter one, or none.",
            param="prediction",
        )
    return tuple(text.encode(prediction)[: rules.context_tokens])  # no response is longer than the context


def _capped(rules: PromptRules, most: int | None) -> PromptRules:
    if most is None or (rules.context_tokens is not None and rules.context_tokens <= most):
        return rules
    return replace(rules, context_tokens=most)


def _fitting(text: TextModel, request: GenerateRequest, rules: PromptRules) -> tuple[GenerateRequest, Rendered]:
    """The request with its prompt, or with the end of it if the client wants it truncated."""
    if request.truncate_prompt_tokens is None:
        return render_within(text, request, rules)
    return request, _end_of_prompt(text, request, rules, request.truncate_prompt_tokens)


def _end_of_prompt(text: TextModel, request: GenerateRequest, rules: PromptRules, kept: int) -> Rendered:
    """The last `kept` tokens of the prompt; -1: as many as fit."""
    rendered = text.render(request, replace(rules, context_tokens=None, max_prompt_tokens=None))
    if kept == -1:
        room = None if rules.context_tokens is None else rules.context_tokens - (request.sampling.max_tokens or 1)
        kept = min((most for most in (room, rules.max_prompt_tokens) if most is not None), default=len(rendered.ids))
    if len(rendered.ids) <= kept:
        return rendered
    if rendered.places:
        raise InvalidValue(
            f"The prompt has pictures and {len(rendered.ids)} tokens, and only texts are truncated to "
            f"{kept} tokens. Send fewer pictures, or no 'truncate_prompt_tokens'.",
            param="truncate_prompt_tokens",
        )
    ids = rendered.ids[-max(1, kept) :]
    return Rendered(text.decode(ids), ids, starts_in_reasoning=rendered.starts_in_reasoning)
