"""Builds a tokenizer from `tekken.json`, the only tokenizer in many of Mistral's repositories.

It lists the bytes of each token in the order in which they merge. Ids begin with those of the control tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from cortex.neuron.families.splits import Split
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.files import MAX_TOKENIZER_BYTES, TEKKEN, read_json
from cortex.neuron.text.tokenizer.gguf_vocabulary import add_whole_tokens, merges_from_scores
from cortex.neuron.text.tokenizer.pretokenizers import pre_tokenizer
from cortex.neuron.text.tokenizer.spelling import CHARACTER_OF_BYTE

NAMED: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_MAX_TOKENS: Final = 1 << 20
"""Far above every published vocabulary; bounds the work for a damaged file."""
_FIRST_CONTROLS: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Those of older files, which do not list them."""


def load(directory: Path) -> Tokenizer:
    """The tokenizer that a model directory's `tekken.json` describes; raises TextFileMalformed."""
    path = directory / TEKKEN
    content = read_json(path, MAX_TOKENIZER_BYTES)
    try:
        return _build(TekkenFile.parse(content))
    except Exception as error:  # the library raises bare Exception for a pattern that it cannot compile
        raise TextFileMalformed(f"{path} is not a tokenizer ({error!r:.200}); download the model again") from error


@dataclass(frozen=True, slots=True)
class TekkenFile:
    """What the file says, checked."""

    pattern: str
    controls: tuple[str, ...]
    """By id."""
    spellings: tuple[bytes, ...]
    """By rank: their ids follow those of the control tokens."""

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> TekkenFile:
        """Raises TypeError, ValueError or LookupError."""
        config = content["config"]
        pattern = config["pattern"]
        if not isinstance(pattern, str):
            raise TypeError(f"the pattern is {pattern!r:.50}, not text")
        num_controls, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        if not len(_FIRST_CONTROLS) <= num_controls < size <= _MAX_TOKENS:
            raise ValueError(f"{num_controls} of {size} tokens are control tokens")
        controls = _controls(content.get("special_tokens"), num_controls)
        vocabulary = content["vocab"][: size - num_controls]
        if [each["rank"] for each in vocabulary] != list(range(size - num_controls)):
            raise ValueError(f"the vocabulary is not {size - num_controls} tokens in the order of their ranks")
        spellings = tuple(base64.b64decode(each["token_bytes"], validate=True) for each in vocabulary)
        distinct = frozenset(spellings)
        if len(distinct) != len(spellings) or b"" in distinct:
            raise ValueError("tokens of the vocabulary are empty or repeated")
        if not distinct.issuperset(bytes([byte]) for byte in range(256)):
            raise ValueError("the vocabulary lacks a token for some byte")
        return cls(pattern, controls, spellings)


def _controls(listed: Sequence[Mapping[str, Any]] | None, num_controls: int) -> tuple[str, ...]:
    """The names of all control tokens by id; raises TypeError, ValueError or LookupError."""
    given = (
        list(enumerate(_FIRST_CONTROLS)) if listed is None else [(each["rank"], each["token_str"]) for each in listed]
    )
    names = dict(given)
    controls = tuple(names.get(rank, f"<SPECIAL_{rank}>") for rank in range(num_controls))
    if not all(isinstance(name, str) and name for name in controls):
        raise TypeError("control tokens have names that are not text, or empty")
    if len(names) != len(given) or len(frozenset(controls)) != num_controls:
        raise ValueError("control tokens are repeated")
    return controls


def _build(file: TekkenFile) -> Tokenizer:
    tokens = ["".join(CHARACTER_OF_BYTE[byte] for byte in spelling) for spelling in file.spellings]
    ids = {token: len(file.controls) + rank for rank, token in enumerate(tokens)}
    controls = {number: AddedToken(token, normalized=False, special=True) for number, token in enumerate(file.controls)}
    ids = {token: number for number, token in enumerate(file.controls)} | ids
    # A word in the vocabulary is one token. In others, neighbours merge whose joint token has the lowest rank.
    split = Split((file.pattern,), whole_words_first=True)
    merges = merges_from_scores(tokens, [-float(rank) for rank in range(len(tokens))])
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=split.whole_words_first, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    add_whole_tokens(tokenizer, controls)
    begin = NAMED["bos_token"]
    if begin in file.controls:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0", special_tokens=[(begin, file.controls.index(begin))]
        )
    return tokenizer
