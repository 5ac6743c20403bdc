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

_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+"


def _words(digits: str, letters: str = r"\p{L}", symbols: str = rf"{_SYMBOLS}[\r\n]*") -> str:
    """Contractions, words with what is before them, numbers, symbols and spaces."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{symbols}|{_SPACES}"


def _cased_words(
    digits: str,
    suffix: str = f"{_CONTRACTIONS}?",
    upper: str = _UPPER,
    lower: str = _LOWER,
    symbols: str = rf"{_SYMBOLS}[\r\n/]*",
) -> str:
    """As `_words`, with a cut before an upper-case letter that follows a lower-case one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return f"{words}|{digits}|{symbols}|{_SPACES}"


_LLAMA3: Final = _words(r"\p{N}{1,3}")
_QWEN2: Final = _words(r"\p{N}")
# Combining marks stay with their letters, which matters for Indic and Thai scripts.
_QWEN35: Final = _words(r"\p{N}", r"[\p{L}\p{M}]", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_SEED: Final = _words(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+")
_TEKKEN: Final = _cased_words(r"\p{N}", suffix="")
_GPT4O: Final = _cased_words(r"\p{N}{1,3}")
_KIMI: Final = r"\p{Han}+|" + _cased_words(
    r"\p{N}{1,3}",
    upper=r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    lower=r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    symbols=rf"{_SYMBOLS}[\r\n]*",
)
_KANJI_AND_KANA: Final = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    _KANJI_AND_KANA,
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_YOUTU: Final = (
    f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|{_KANJI_AND_KANA}",
    _cased_words(r"\p{N}"),
)


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """One way to split: by each of the patterns in turn. Without patterns it is GPT-2's own, which the byte-level step
    contains."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    normal_form_c: bool = False
    whole_words_first: bool = False
    """Whether a word in the vocabulary becomes one token without applying merges."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        return pre_tokenizers.Sequence([*steps, *digits, byte_level]) if steps or digits else byte_level

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.normal_form_c else None


_GPT2_PRETOKENIZER: Final = Pretokenizer()
_DIGITS_PRETOKENIZER: Final = Pretokenizer(single_digits=True)
_LLAMA3_PRETOKENIZER: Final = Pretokenizer((_LLAMA3,), whole_words_first=True)
_CL100K_PRETOKENIZER: Final = Pretokenizer((_LLAMA3,))
_QWEN2_PRETOKENIZER: Final = Pretokenizer((_QWEN2,), normal_form_c=True)
_QWEN2_AS_IT_IS: Final = Pretokenizer((_QWEN2,))
_GPT4O_PRETOKENIZER: Final = Pretokenizer((_GPT4O,))
_DEEPSEEK3_PRETOKENIZER: Final = Pretokenizer(_DEEPSEEK3)

BY_NAME: Final[dict[str, Pretokenizer]] = {
    **dict.fromkeys(
        ("default", "gpt-2", "gpt2", "modern-bert", "phi-2", "olmo", "exaone4", "mellum", "gigachat", "a.x-4.0"),
        _GPT2_PRETOKENIZER,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_PRETOKENIZER
    ),
    "command-r": Pretokenizer(single_digits=True, normal_form_c=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano"),
        _LLAMA3_PRETOKENIZER,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K_PRETOKENIZER),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_PRETOKENIZER),
    **dict.fromkeys(("megrez", "stablelm2", "hunyuan", "solar-open"), _QWEN2_AS_IT_IS),
    "qwen35": Pretokenizer((_QWEN35,), normal_form_c=True),
    "laguna": Pretokenizer((r"[^\n]+|\n+", _QWEN2)),
    "seed-coder": Pretokenizer((_SEED,)),
    "tekken": Pretokenizer((_TEKKEN,), whole_words_first=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), _GPT4O_PRETOKENIZER),
    "kimi-k2": Pretokenizer((_KIMI,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3_PRETOKENIZER),
    "youtu": Pretokenizer(_YOUTU, whole_words_first=True),
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
