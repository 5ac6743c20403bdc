"""Prompts of models that fill in text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Callable

from cortex.neuron.text.tokenizer.tokenizer import Tokenizer
from cortex.wire.errors import UnsupportedModality

_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""The control tokens before prefix, suffix and middle: Qwen, StarCoder, SantaCoder, GLM, DeepSeek, CodeLlama."""


def markers(tokenizer: Tokenizer) -> tuple[str, str, str] | None:
    """Those that the vocabulary has; None for a model that was not trained to fill in."""
    return next((three for three in _MARKERS if all(tokenizer.whole_id(each) is not None for each in three)), None)


def has_markers(is_token: Callable[[str], bool]) -> bool:
    """Whether a vocabulary that has not been built has all tokens of one model family."""
    return any(all(map(is_token, three)) for three in _MARKERS)


def fill_in_prompt(prefix: str, suffix: str, tokenizer: Tokenizer) -> str:
    """Raises UnsupportedModality for a model without the tokens."""
    found = markers(tokenizer)
    if found is None:
        raise UnsupportedModality(
            "This model has no tokens for filling in; choose one with the capability `insert` in /v1/models.",
            param="suffix",
        )
    return f"{found[0]}{prefix}{found[1]}{suffix}{found[2]}"
