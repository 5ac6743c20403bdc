"""Prompts of models that fill in text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

_REPOSITORY_MARKERS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))
"""The control tokens before the name of a repository and of each of its files: Qwen, StarCoder 2, StarCoder."""
_PROJECT, _FILE = "myproject", "filename"
"""Names for the repository and the file of the gap, which clients do not send; those of llama.cpp."""


def markers(tokenizer: Tokenizer) -> tuple[str, str, str] | None:
    """The markers in the vocabulary; None for a model that was not trained to fill in."""
    return next((three for three in _MARKERS if all(tokenizer.whole_id(each) is not None for each in three)), None)


def has_markers(is_token: Callable[[str], bool]) -> bool:
    """Whether a vocabulary that has not been built has all tokens of one model family."""
    return any(all(map(is_token, three)) for three in _MARKERS)


def fill_in_prompt(
    prefix: str, suffix: str, tokenizer: Tokenizer, middle: str = "", files: Sequence[tuple[str, str]] = ()
) -> str:
    """`middle`: the beginning of the text to fill in. `files`: names and texts of other files, which come first, with
    the tokens for repositories if the vocabulary has them.

    Raises UnsupportedModality for a model without the tokens.
    """
    found = markers(tokenizer)
    if found is None:
        raise UnsupportedModality(
            "This model has no tokens for filling in; choose one with the capability `insert` in /v1/models.",
            param="suffix",
        )
    return f"{_before(files, tokenizer)}{found[0]}{prefix}{found[1]}{suffix}{found[2]}{middle}"


def _before(files: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> str:
    if not files:
        return ""
    for repository, separator in _REPOSITORY_MARKERS:
        if tokenizer.whole_id(separator) is not None:
            begin = f"{repository}{_PROJECT}\n" if tokenizer.whole_id(repository) is not None else ""
            parts = "".join(f"{separator}{name}\n{text}" for name, text in files)
            return f"{begin}{parts}{separator}{_FILE}\n"
    return "".join(f"{text}\n" for _, text in files)
