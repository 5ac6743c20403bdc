"""How text is split before byte-level merges apply: the patterns that several families share.

They are those of the published tokenizers: a model's merges were learned on exactly these splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class Split:
    """One way to split: by each of the patterns in turn. Without patterns it is GPT-2's own, which the byte-level step
    contains."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    normal_form_c: bool = False
    whole_words_first: bool = False
    """Whether a word in the vocabulary becomes one token without applying merges."""


def words(digits: str, letters: str = r"\p{L}", symbols: str = rf"{SYMBOLS}[\r\n]*") -> str:
    """Contractions, words with what is before them, numbers, symbols and spaces."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{symbols}|{SPACES}"


def cased_words(
    digits: str,
    suffix: str = f"{_CONTRACTIONS}?",
    upper: str = _UPPER,
    lower: str = _LOWER,
    symbols: str = rf"{SYMBOLS}[\r\n/]*",
) -> str:
    """As `words`, with a cut before an upper-case letter that follows a lower-case one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    both = rf"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return f"{both}|{digits}|{symbols}|{SPACES}"


def any_of(ranges: str) -> str:
    """A class with the characters of `ranges`, each given as its first and last one in base 16."""
    ends = (part.split("-") for part in ranges.split())
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in pair) for pair in ends) + "]"


GPT2: Final = Split()
DIGITS: Final = Split(single_digits=True)
CL100K: Final = Split((words(r"\p{N}{1,3}"),))
CL100K_WHOLE: Final = Split(CL100K.patterns, whole_words_first=True)
ONE_DIGIT: Final = Split((words(r"\p{N}"),))
ONE_DIGIT_NFC: Final = Split(ONE_DIGIT.patterns, normal_form_c=True)
O200K: Final = Split((cased_words(r"\p{N}{1,3}"),))
KANJI_AND_KANA: Final = "[一-龥\u3040-ゟ゠-ヿ]+"
THREE_PASSES: Final = Split(
    (
        r"\p{N}{1,3}",
        KANJI_AND_KANA,
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
    )
)

OTHERS: Final[Mapping[str, Split]] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "gigachat", "a.x-4.0"), GPT2),
    **dict.fromkeys(("starcoder", "refact", "codeshell", "minerva-7b"), DIGITS),
    **dict.fromkeys(("falcon3", "falcon-h1", "midm-2.0"), CL100K_WHOLE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), CL100K),
    **dict.fromkeys(("megrez", "stablelm2", "solar-open"), ONE_DIGIT),
    **dict.fromkeys(("gpt-4o", "kanana2"), O200K),
    "joyai-llm": THREE_PASSES,
}
"""Names in GGUF files that belong to no family here."""
