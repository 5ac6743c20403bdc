"""How texts are split before merges apply, by the names in GGUF files."""

from __future__ import annotations

import pytest

from cortex.neuron.families.registry import GGUF, SPLITS
from cortex.neuron.text.errors import TokenizerUnsupported
from cortex.neuron.text.tokenizer.gguf_vocabulary import pre_tokenizer, split_named

PUBLISHED = {
    "cohere2": ["command-r"],
    "deepseek2": ["deepseek-llm", "deepseek-v3", "glm4", "kimi-k2"],  # DeepSeek V2, V3 and R1, GLM-4.7-Flash, Kimi K2
    "ernie4_5": [],
    "ernie4_5-moe": [],
    "eurobert": ["llama-bpe", "jina-v5-nano"],
    "exaone4": ["exaone4"],
    "gemma-embedding": [],
    "gemma3": [],
    "gemma4": [],
    "glm4": ["glm4", "chatglm-bpe"],
    "glm4moe": ["glm4"],
    "gpt-oss": ["gpt-4o"],
    "granite": ["refact", "dbrx"],
    "granitehybrid": ["dbrx"],
    "hunyuan-dense": ["hunyuan-dense"],
    "laguna": ["laguna"],
    "lfm2": ["lfm2"],
    "lfm2moe": ["lfm2"],
    "llama": ["llama-bpe", "smollm", "tekken", "deepseek-r1-qwen", "deepseek-llm", "deepseek-coder"],
    "mellum": ["mellum2"],
    "minimax-m2": ["minimax-m2"],
    "mistral3": ["tekken"],
    "muse-glimmer": ["llama4"],
    "nemotron_h": ["pixtral"],
    "nemotron_h_moe": ["pixtral"],
    "olmo2": ["dbrx"],
    "phi3": ["dbrx", "gpt-4o"],
    "qwen2": ["qwen2"],
    "qwen3": ["qwen2"],
    "qwen35": ["qwen35"],
    "qwen35moe": ["qwen35"],
    "qwen3moe": ["qwen2"],
    "qwen3next": ["qwen2"],
    "qwen3vl": ["qwen2"],
    "qwen3vlmoe": ["qwen2"],
    "seed_oss": ["seed-coder"],
    "smollm3": ["smaug-bpe"],
}
"""Architecture of GGUF files → the names that published files of it have; none: SentencePiece vocabularies."""


def test_every_architecture_has_the_ways_to_split_of_its_published_files() -> None:
    assert set(PUBLISHED) == {name for name, stored in GGUF.items() if not stored.family.is_encoder}
    assert {name for names in PUBLISHED.values() for name in names} <= set(SPLITS)
    with pytest.raises(TokenizerUnsupported, match="'of tomorrow'"):
        split_named("of tomorrow")


TEXT = "World's camelCase 12345 你好 ありがとう안녕! x=f(a_b);\n\n  e"


def split(name: str, text: str) -> str:
    pieces = pre_tokenizer(split_named(name)).pre_tokenize_str(text)
    return "|".join(text[start:end] for _, (start, end) in pieces)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exaone4", "World|'s| camelCase| 12345| 你好| ありがとう안녕|!| x|=|f|(|a|_|b|);|\n\n | e"),
        ("command-r", "World|'s| camelCase| |1|2|3|4|5| 你好| ありがとう안녕|!| x|=|f|(|a|_|b|);|\n\n | e"),
        ("glm4", "World|'s| camelCase| |123|45| 你好| ありがとう안녕|!| x|=f|(a|_b|);\n\n| | e"),
        ("seed-coder", "World|'s| camelCase| |1|2|3|4|5| 你好| ありがとう안녕|!| x|=f|(a|_b|);|\n\n| | e"),
        ("laguna", "World|'s| camelCase| |1|2|3|4|5| 你好| ありがとう안녕|!| x|=f|(a|_b|);|\n\n| | e"),
        ("minimax-m2", "World's| camel|Case| |123|45| 你好| ありがとう안녕|!| x|=f|(a|_b|);\n\n| | e"),
        ("kimi-k2", "World's| camel|Case| |123|45| |你好| ありがとう안녕|!| x|=f|(a|_b|);\n\n| | e"),
        ("hunyuan-dense", "World|'s| camelCase| |123|45| |你好| |ありがとう|안녕|!| x|=f|(a|_b|);\n\n| | e"),
        ("deepseek-llm", "World|'|s| camelCase| |1|2|3|4|5| |你好| |ありがとう안녕|!| x|=|f|(|a|_|b|);|\n|\n| | e"),
        ("deepseek-coder", "World|'|s| camelCase| |1|2|3|4|5| |你好| |ありがとう안녕|!| x|=|f|(|a|_|b|);|\n|\n| | e"),
        ("youtu", "World's| camel|Case| |1|2|3|4|5| |你好| |ありがとう|안녕|!| x|=f|(a|_b|);\n\n| | e"),
    ],
)
def test_text_is_split_as_the_model_was_trained(name: str, expected: str) -> None:
    assert split(name, TEXT) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("exaone4 command-r", "DON|'|T| a|);|\n|/|b| ก|็"),
        ("glm4 qwen2", "DON|'T| a|);\n|/b| ก|็"),
        ("seed-coder laguna", "DON|'T| a|);|\n|/b| ก|็"),
        ("qwen35 hunyuan-dense", "DON|'T| a|);\n|/b| ก็"),
        ("tekken", "DON|'T| a|);\n/|b| ก็"),
        ("deepseek-llm", "DON|'|T| a|);|\n|/|b| |ก็"),
        ("deepseek-coder", "DON|'|T| a|);|\n|/|b| |ก|็"),
        ("minimax-m2 youtu", "DON'T| a|);\n/|b| ก็"),
        ("kimi-k2", "DON'T| a|);\n|/b| ก็"),
    ],
)
def test_upper_case_contractions_slashes_and_combining_marks_are_split_as_trained(names: str, expected: str) -> None:
    for name in names.split():
        assert split(name, "DON'T a);\n/b ก็") == expected, name


def test_first_tokenizers_of_deepseek_differ_in_letters_and_signs() -> None:
    """One knows only the capital ones of the Armenian letters, and all signs of ASCII as punctuation."""
    assert split("deepseek-llm", "Ωհայ +=.  ") == "Ω|հայ| +=.|  "
    assert split("deepseek-coder", "Ωհայ +=.  ") == "Ωհայ| +=|.|  "
