"""Turns a request into the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from cortex.neuron.families.family import ReasoningMarkers
from cortex.neuron.pictures.picture import PicturePlace
from cortex.neuron.pictures.spec import PictureSpec, PictureText
from cortex.neuron.text.output.reasoning import opens_reasoning
from cortex.neuron.text.template import conversation
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.detect import tool_syntax
from cortex.neuron.text.template.literal_content import LiteralContent
from cortex.neuron.text.template.pictures import (
    PlaceholderExpansion,
    expanded,
    moved_token,
    numbers_in,
    picture_grids,
    placeholders,
)
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer
from cortex.wire.errors import InvalidValue, TemplateRenderFailed, prompt_too_large, prompt_too_long
from cortex.wire.requests import GenerateRequest

_CONTINUE: Final = "continue_final_message"
# The space shows whether the template trimmed the message that is continued.
_MARK: Final = "\ue000continue here\ue001 "


@dataclass(frozen=True, slots=True)
class PromptRules:
    """The bounds of a prompt and its grammar. None: no bound."""

    context_tokens: int | None = None
    """The context of the model, which the prompt shares with the response."""
    max_prompt_tokens: int | None = None
    """The node's own limit for prompts."""
    max_characters: int | None = None
    max_grammar_characters: int | None = None
    max_grammar_cpu_s: float | None = None
    """How long compiling the grammar may take. The engine compiles it again, while other requests wait."""
    control_tokens_in_messages: bool = False
    """Whether the text of a control token in a message becomes that token, as in the reference library."""


NO_RULES: Final = PromptRules()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, ready for an engine."""

    text: str
    """Empty if the prompt was given as token ids."""
    ids: tuple[int, ...]
    turn_ends: tuple[int, ...] = ()
    """Token positions, ascending, up to which a later turn of this conversation repeats the prompt exactly."""
    starts_in_reasoning: bool = False
    """Whether the prompt opened reasoning: the output is reasoning until the model closes it."""
    places: tuple[PicturePlace, ...] = ()
    """Where the pictures are, in the order of the prompt."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """A rendered conversation before it is tokenised."""

    text: str
    generation_prompt: str
    """Its end, after the last finished turn: the beginning of the response."""
    turn_ends: tuple[int, ...]
    """Character positions where finished turns end."""
    literal_at: tuple[int, ...] = ()
    """Characters at which no control token begins, ascending."""
    pictures: tuple[int, ...] = ()
    """The numbers of the pictures, in the order of the text. One token stands for each."""


def render_raw(prompt: str | Sequence[int], tokenizer: Tokenizer, rules: PromptRules) -> Rendered:
    """A prompt without a template; text gets the tokens that the model expects around a document. Raises InvalidValue
    or ContextLengthExceeded."""
    if isinstance(prompt, str):
        _check_length(prompt, tokenizer, rules)
        return Rendered(prompt, tuple(tokenizer.encode_document(prompt)))
    if (highest := max(prompt, default=0)) >= tokenizer.vocab_size:  # dialects accept no negative ones
        raise InvalidValue(
            f"token id {highest} is outside the vocabulary of {tokenizer.vocab_size} tokens; use /tokenize",
            param="prompt",
        )
    return Rendered("", tuple(prompt))


def render_conversation(
    request: GenerateRequest,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    markers: ReasoningMarkers | None,
    literal_content: LiteralContent | None,
    rules: PromptRules,
    spec: PictureSpec | None = None,
) -> Rendered:
    """With `literal_content`, text of the client yields no control token. `spec`: how the model takes pictures. Raises
    TemplateRenderFailed, UnsupportedModality, InvalidValue or ContextLengthExceeded."""
    grids = picture_grids(request, spec)
    prompt = prompt_text(request, template, tokenizer, literal_content, None if spec is None else spec.text)
    _check_length(prompt.text, tokenizer, rules, sum(grid.num_tokens for grid in grids.values()))
    encoded = tokenizer.encode_segmented(prompt.text, prompt.literal_at, request.tenant)
    # Only positions at cuts are stable: elsewhere the next turn's text could merge with the last token.
    turn_ends = {encoded.cut_before(end) for end in prompt.turn_ends}
    ids, places = encoded.ids, tuple[PicturePlace, ...]()
    if spec is not None and prompt.pictures:
        ids, places = expanded(ids, prompt.pictures, grids, spec.text, tokenizer)
        turn_ends = {moved_token(end, places) for end in turn_ends}
    return Rendered(
        prompt.text,
        ids,
        tuple(sorted(turn_ends - {0})),
        markers is not None and opens_reasoning(prompt.generation_prompt, markers),
        places,
    )


def prompt_text(
    request: GenerateRequest,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    literal_content: LiteralContent | None = None,
    picture: PictureText | None = None,
) -> PromptText:
    """Renders the prompt, and finds the turn ends by rendering fewer messages: a prefix of the prompt is stable."""
    if not request.messages:
        raise InvalidValue("messages is empty; send at least one message", param="messages")
    syntax = tool_syntax(template, tokenizer.has_whole)
    values = conversation.variables(request, template, tokenizer.named_tokens, syntax, picture)
    continues = bool(values.pop(_CONTINUE, False))
    render = partial(_continuation, template) if continues else template.render
    literal_at: tuple[int, ...] = ()
    if literal_content is None:
        text = render(values)
    else:
        trusted = tokenizer.named_tokens.keys() - request.template_args.keys()
        literal = literal_content.render(render, values, trusted)
        text, literal_at = literal.text, literal.literal_at
    messages = values["messages"]
    finished = len(messages) - 1 if continues else len(messages)
    last_query = max((i + 1 for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), finished)

    ends = {count: _end_of(template, values, count, text) for count in {finished, last_query, leading} - {0}}
    prompt = PromptText(
        text,
        text[ends.get(finished) or 0 :],
        tuple(sorted({end for end in ends.values() if end is not None})),
        literal_at,
    )
    numbers = numbers_in(messages)
    return prompt if picture is None or not numbers else _with_pictures(prompt, picture, numbers)


def _with_pictures(prompt: PromptText, picture: PictureText, numbers: Sequence[int]) -> PromptText:
    """The prompt with the text around each picture. Raises TemplateRenderFailed for a picture without a place."""
    at = placeholders(prompt.text, picture, prompt.literal_at, len(numbers))
    around = PlaceholderExpansion(prompt.text, picture, at)
    return PromptText(
        around.text,
        prompt.generation_prompt,
        tuple(map(around.moved, prompt.turn_ends)),
        tuple(map(around.moved, prompt.literal_at)),
        tuple(numbers),
    )


def _check_length(text: str, tokenizer: Tokenizer, rules: PromptRules, num_picture_tokens: int = 0) -> None:
    """Raises ContextLengthExceeded before tokenising: 20 MB of text would take one core a minute."""
    least, context_tokens = tokenizer.min_tokens(text) + num_picture_tokens, rules.context_tokens
    most = rules.max_prompt_tokens
    if context_tokens is not None and (least >= context_tokens or least > (most or context_tokens)):
        raise prompt_too_long(least, context_tokens, most)
    check_size(text, rules)


def check_size(text: str, rules: PromptRules) -> None:
    """Raises ContextLengthExceeded for more text than the node tokenises."""
    if rules.max_characters is not None and len(text) > rules.max_characters:
        raise prompt_too_large(len(text), rules.max_characters)


def _end_of(template: ChatTemplate, values: dict[str, Any], count: int, text: str) -> int | None:
    """Where the first `count` messages end in `text`; None if the template renders them differently alone."""
    try:
        part = template.render(
            {**values, "messages": values["messages"][:count], "add_generation_prompt": False, _CONTINUE: False}
        )
    except TemplateRenderFailed:
        return None  # many templates reject a conversation without a user
    return len(part) if text.startswith(part) else None


def _continuation(template: ChatTemplate, values: dict[str, Any]) -> str:
    """The prompt up to the end of the last message, which the model continues."""
    *earlier, last = values["messages"]
    if last["role"] != "assistant" or not last["content"]:
        raise InvalidValue(
            "continue_final_message needs an assistant message with text at the end of messages", param="messages"
        )
    marked = {**last, "content": last["content"] + _MARK}
    text = template.render({**values, "messages": [*earlier, marked], "add_generation_prompt": False})
    start = text.rfind(_MARK.rstrip())
    if start < 0:
        raise TemplateRenderFailed(
            "the model's chat template does not show the last message, so it cannot be continued; "
            "end the conversation with a user message"
        )
    return text[:start] if text.startswith(_MARK, start) else text[:start].rstrip()
