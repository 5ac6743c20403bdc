"""Errors for prompts that are too long, in the words by which clients recognise them."""

from __future__ import annotations

from cortex.wire.errors import ContextLengthExceeded, PromptTooLongForMemory


def prompt_too_long(
    num_tokens: int, context_tokens: int, max_prompt_tokens: int | None = None
) -> ContextLengthExceeded:
    """The error for a prompt of at least `num_tokens` tokens, where the response needs one token of the context.

    Clients recognise an overflow by its words as well as by its code, and shorten the conversation. OpenAI's clients
    look for "maximum context length is", Anthropic's for "prompt is too long". The message passes through streams and
    gateways, which translate between the dialects, so it has both.
    """
    largest = context_tokens - 1
    limit = f"This model's maximum context length is {context_tokens} tokens, and the response needs at least one."
    if max_prompt_tokens is not None and max_prompt_tokens < largest:
        largest = max_prompt_tokens
        limit = (
            f"This model's maximum context length is {largest} tokens on this node (limits.max_prompt_tokens in "
            "neuron.toml)."
        )
    return ContextLengthExceeded(
        f"prompt is too long: {num_tokens} tokens > {largest} maximum. {limit} Shorten the conversation.",
        details={"prompt_tokens": num_tokens, "max_prompt_tokens": largest, "context_tokens": context_tokens},
    )


def prompt_too_large(num_characters: int, max_characters: int) -> ContextLengthExceeded:
    """The error for a prompt of so much text that the node does not tokenise it. Its words are those of
    `prompt_too_long`, so that clients shorten the conversation."""
    return ContextLengthExceeded(
        f"prompt is too long: {num_characters} characters > {max_characters} maximum on this node "
        "(text.max_prompt_mb in neuron.toml). Shorten the conversation.",
        details={"prompt_characters": num_characters, "max_prompt_characters": max_characters},
    )


def prompt_too_long_for_memory(num_tokens: int, reason: str) -> PromptTooLongForMemory:
    """The error for a prompt that ran out of memory alone, in the words that clients recognise as an overflow. How much
    shorter it must be is not known."""
    return PromptTooLongForMemory(
        f"prompt is too long: {num_tokens} tokens do not fit the device's memory, so this model's maximum context "
        f"length is less than {num_tokens} tokens on this node. Shorten the conversation. ({reason})",
        details={"prompt_tokens": num_tokens},
    )


def text_too_long(index: int, num_tokens: int, context_tokens: int) -> ContextLengthExceeded:
    """The error for a text that an embedding or rerank model cannot take as a whole."""
    return ContextLengthExceeded(
        f"Text {index} has {num_tokens} tokens. This model's maximum context length is {context_tokens} tokens. Send "
        "shorter texts, or have them cut off with 'truncate_prompt_tokens': -1.",
        details={"prompt_tokens": num_tokens, "max_prompt_tokens": context_tokens, "context_tokens": context_tokens},
    )
