"""How text is split before byte-level merges apply, by the names that GGUF files use.

The patterns are those of the published tokenizers: a model's merges were learned on exactly these splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

from cortex.neuron.text.errors import TokenizerUnsupported

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# Combining marks stay with their letters, which matters for Indic and Thai scripts.
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """One way to split. `pattern=None` is GPT-2's own, which the byte-level step contains."""

    pattern: str | None = None
    single_digits: bool = False
    normal_form_c: bool = False
    whole_words_first: bool = False
    """Whether a word in the vocabulary becomes one token without applying merges."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        if self.pattern is not None:
            return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(self.pattern), "isolated"), byte_level])
        if self.single_digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        return byte_level

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.normal_form_c else None


_GPT2_PRETOKENIZER: Final = Pretokenizer()
_DIGITS_PRETOKENIZER: Final = Pretokenizer(single_digits=True)
_LLAMA3_PRETOKENIZER: Final = Pretokenizer(_LLAMA3, whole_words_first=True)
_QWEN2_PRETOKENIZER: Final = Pretokenizer(_QWEN2, normal_form_c=True)

BY_NAME: Final[dict[str, Pretokenizer]] = {
    "default": _GPT2_PRETOKENIZER,
    "gpt-2": _GPT2_PRETOKENIZER,
    "gpt2": _GPT2_PRETOKENIZER,
    "modern-bert": _GPT2_PRETOKENIZER,
    "smollm": _DIGITS_PRETOKENIZER,
    "starcoder": _DIGITS_PRETOKENIZER,
    "refact": _DIGITS_PRETOKENIZER,
    "codeshell": _DIGITS_PRETOKENIZER,
    "llama-bpe": _LLAMA3_PRETOKENIZER,
    "llama3": _LLAMA3_PRETOKENIZER,
    "llama-v3": _LLAMA3_PRETOKENIZER,
    "falcon3": _LLAMA3_PRETOKENIZER,
    "pixtral": _LLAMA3_PRETOKENIZER,
    "lfm2": _LLAMA3_PRETOKENIZER,
    "dbrx": Pretokenizer(_LLAMA3),
    "smaug-bpe": Pretokenizer(_LLAMA3),
    "qwen2": _QWEN2_PRETOKENIZER,
    "deepseek-r1-qwen": _QWEN2_PRETOKENIZER,
    "megrez": Pretokenizer(_QWEN2),
    "stablelm2": Pretokenizer(_QWEN2),
    "qwen35": Pretokenizer(_QWEN35, normal_form_c=True),
    "tekken": Pretokenizer(_TEKKEN, whole_words_first=True),
    "gpt-4o": Pretokenizer(_GPT4O),
    "llama4": Pretokenizer(_GPT4O),
}


def by_name(name: str) -> Pretokenizer:
    """Raises TokenizerUnsupported: a wrong split would silently make the model worse."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise TokenizerUnsupported(
            f"the GGUF file names the pre-tokenizer {name!r}, supported are {', '.join(sorted(BY_NAME))}; "
            "serve the model from safetensors, or add the name to neuron/text/tokenizer/pretokenizers.py"
        ) from None
