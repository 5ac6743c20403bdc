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
_DEEPSEEK_LETTERS: Final = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""The letters with an upper and a lower case that DeepSeek's first tokenizers keep together, as ranges of code points.
Unicode has more of them, such as the lower-case Armenian ones."""


def _any_of(ranges: str) -> str:
    """A class with the characters of `ranges`, of each of which it has the first and the last one in base 16."""
    ends = (part.split("-") for part in ranges.split())
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in pair) for pair in ends) + "]"


_EAST_ASIAN: Final = f"{_any_of('800-9FA5 AC00-D7FF')}+"
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?{_any_of(_DEEPSEEK_LETTERS)}+",
    rf"\s?{_any_of('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}+",
    r"\s+$",
    _EAST_ASIAN,
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN)
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
    "deepseek-llm": Pretokenizer(_DEEPSEEK_LLM, single_digits=True),
    "deepseek-coder": Pretokenizer(_DEEPSEEK_CODER, single_digits=True),
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
