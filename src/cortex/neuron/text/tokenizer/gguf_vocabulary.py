"""Builds a tokenizer from the vocabulary in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cortex.neuron.families.registry import SPLITS
from cortex.neuron.families.splits import Split
from cortex.neuron.text.errors import TextFileMalformed, TextModelError, TokenizerMissing, TokenizerUnsupported


def split_named(name: str) -> Split:
    """Raises TokenizerUnsupported: a wrong split would silently make the model worse."""
    try:
        return SPLITS[name]
    except KeyError:
        raise TokenizerUnsupported(
            f"the GGUF file names the pre-tokenizer {name!r}, supported are {', '.join(sorted(SPLITS))}; "
            "serve the model from safetensors, or add the name to its family in neuron/families/"
        ) from None


def pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    return pre_tokenizers.Sequence([*steps, *digits, byte_level]) if steps or digits else byte_level


def normalizer(split: Split) -> normalizers.Normalizer | None:
    return normalizers.NFC() if split.normal_form_c else None


SPACE: Final = "▁"
"""How SentencePiece vocabularies write a space."""

_MAX_TOKEN_CHARACTERS: Final = 1024
"""Far above every published vocabulary; bounds the work for a damaged file, which grows with the square of a length."""
_NAMED: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the files
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_END_IDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_SENTENCEPIECE: Final = frozenset({"llama", "gemma4"})
_END_TOKENS: Final = {"gemma4": ("<eos>", "<turn|>", "<|tool_response>")}
"""Kind of a tokenizer → tokens that end a generation, which its files do not name."""

_TURN_ENDS: Final = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "[|endofturn|]"),
        *("<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
    }
)
"""Whole tokens that end a turn in any vocabulary that has them. Many files name only one of their end tokens."""


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` describes; raises TextModelError, and MemoryError."""
    try:
        return _build(metadata)
    except (TextModelError, MemoryError):  # a file that needs more memory than there is may be whole
        raise
    except Exception as error:  # the library raises bare Exception, for merges without their tokens among others
        raise TextFileMalformed(
            f"the GGUF vocabulary is damaged ({str(error)[:200]}); download the file again"
        ) from error


def _build(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerMissing("the GGUF file has no vocabulary; download a complete file of the model")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind in _SENTENCEPIECE:
        tokenizer = _sentencepiece(metadata, tokens)
    elif kind == "bert":
        return _wordpiece(metadata, tokens)
    elif kind == "t5":
        return _unigram(metadata, tokens)
    else:
        raise TokenizerUnsupported(
            f"the GGUF file has a tokenizer of kind {kind!r}, supported are 'gpt2', 'llama', 'gemma4', 'bert' and "
            "'t5'; serve the model from safetensors"
        )
    add_whole_tokens(tokenizer, _whole_tokens(tokens, metadata))
    _add_begin_and_end(tokenizer, metadata, sentencepiece=kind in _SENTENCEPIECE)
    return tokenizer


def named_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and similar, under the names that templates use."""
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    found = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _NAMED.items()}
    return {name: tokens[i] for name, i in found.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a generation: those that the file names first."""
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_IDS]
    unnamed = {*_TURN_ENDS, *_END_TOKENS.get(str(metadata.get("tokenizer.ggml.model")), ())}
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    if "<|return|>" in tokens:  # in harmony this ends a message, and the turn continues
        unnamed -= {"<|end|>"}
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    whole = {i for i, kind in enumerate(kinds) if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)}
    found += [i for i, token in enumerate(tokens) if token in unnamed and i in whole]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int)))


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    split = split_named(metadata.get("tokenizer.ggml.pre", "default"))
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    model = models.BPE(
        vocab=_ids(tokens, metadata),
        merges=_checked_pairs(merges),
        ignore_merges=split.whole_words_first,
        fuse_unk=False,
    )
    tokenizer = Tokenizer(model)
    if (form := normalizer(split)) is not None:
        tokenizer.normalizer = form
    tokenizer.pre_tokenizer = pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges:
        pairs = _checked_pairs(tuple(merge.split(" ", 1)) for merge in merges)
    elif scores and len(scores) == len(tokens):
        try:
            pairs = merges_from_scores(tokens, scores)
        except ValueError as error:
            raise TextFileMalformed(f"the GGUF vocabulary is damaged: {error}; download the file again") from error
    else:
        raise TextFileMalformed("the GGUF vocabulary has neither scores nor merges; download a complete file")
    unknown = named_tokens(metadata).get("unk_token")
    tokenizer = Tokenizer(
        models.BPE(vocab=_ids(tokens, metadata), merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="first" if prefixed else "never", split=False
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _wordpiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Converters write a space before words, and leave out the mark of continuations."""
    names = named_tokens(metadata)
    words = [
        token
        if token.startswith("[") and token.endswith("]")
        else token[1:]
        if token.startswith(SPACE)
        else f"##{token}"
        for token in tokens
    ]
    begin = names.get("cls_token") or names.get("bos_token", "")
    end = names.get("sep_token") or names.get("eos_token", "")
    if begin not in words or end not in words:
        raise TextFileMalformed("the GGUF vocabulary names no tokens for the ends of a text; download a complete file")
    tokenizer = Tokenizer(models.WordPiece(_ids(words, metadata), unk_token=names.get("unk_token", "[UNK]")))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = [AddedToken(token, special=True) for token in words if token.startswith("[") and token.endswith("]")]
    tokenizer.add_special_tokens([token for token in special if not token.content.startswith("[unused")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, words.index(begin)), (end, words.index(end))],
    )
    return tokenizer


def _unigram(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """The SentencePiece of XLM-RoBERTa: pieces with scores; the most likely sequence wins."""
    names, scores = named_tokens(metadata), metadata.get("tokenizer.ggml.scores")
    begin, end = names.get("bos_token"), names.get("eos_token")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if not scores or len(scores) != len(tokens) or begin is None or end is None or not isinstance(unknown, int):
        raise TextFileMalformed("the GGUF vocabulary lacks scores or special tokens; download a complete file")
    tokenizer = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unknown))
    steps: list[normalizers.Normalizer] = []
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(byte & 0xFF for byte in charsmap)))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always" if prefixed else "never")
    tokenizer.decoder = decoders.Metaspace(SPACE, "always" if prefixed else "never")
    add_whole_tokens(tokenizer, _whole_tokens(tokens, metadata))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} {end} $B {end}",
        special_tokens=[(begin, tokens.index(begin)), (end, tokens.index(end))],
    )
    return tokenizer


def _ids(tokens: Sequence[str], metadata: Mapping[str, Any]) -> dict[str, int]:
    """The ids under which the model's own rules find tokens. Where a word is spelled like a control token, its spelling
    is found as the word here, so that both keep an id. Encoded text never has the word's id: it is split at the control
    token first, and literal text is broken there. Padding entries may repeat; the first spelling keeps its id."""
    whole = _whole_tokens(tokens, metadata)
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if i not in whole:
            ids.setdefault(token, i)
    for i, added in whole.items():
        ids.setdefault(added.content, i)
    return ids


def _checked_pairs(merges: Iterable[tuple[str, ...]]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        if len(merge) != 2:
            raise TextFileMalformed(f"the GGUF file has the merge {merge!r}, not a pair; download it again")
        pairs.append((merge[0], merge[1]))
    return pairs


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges in the order of SentencePiece, which joins the neighbours whose joint piece has the best score.

    Raises ValueError for a token that is too long.
    """
    known = set(tokens)
    if (longest := max(map(len, known), default=0)) > _MAX_TOKEN_CHARACTERS:
        raise ValueError(f"a token has {longest} characters, more than {_MAX_TOKEN_CHARACTERS}")
    ranked: list[tuple[float, int, int, str, str]] = []
    for i, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                ranked.append((-score, i, -cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _whole_tokens(tokens: Sequence[str], metadata: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The control tokens by id, and those like `<think>`."""
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    return {
        i: AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    }


def add_whole_tokens(tokenizer: Tokenizer, tokens: Mapping[int, AddedToken]) -> None:
    """Adds tokens at which text is split before anything else, under these ids.

    The library gives a token the id of the entry of the vocabulary with its spelling. While they are added, the
    vocabulary therefore contains only them, and each of two tokens with the same spelling keeps its id.
    """
    model = tokenizer.model
    ids: dict[str, int] = {}
    for i, token in tokens.items():
        ids.setdefault(token.content, i)
    tokenizer.model = models.BPE(vocab=ids, merges=[])
    tokenizer.add_special_tokens([token for token in tokens.values() if token.special])
    tokenizer.add_tokens([token for token in tokens.values() if not token.special])
    tokenizer.model = model


def _add_begin_and_end(tokenizer: Tokenizer, metadata: Mapping[str, Any], *, sentencepiece: bool) -> None:
    """Adds the tokens around a document. SentencePiece models have a begin token unless the file says otherwise."""
    named = named_tokens(metadata)
    begin = named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", sentencepiece) else None
    end = named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if metadata.get("tokenizer.ggml.add_sep_token", False):  # encoders with a byte-level vocabulary
        begin, end = named.get("cls_token") or begin, named.get("sep_token") or end
    around = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token is not None]
    if around:
        single = " ".join(part for part in (begin and f"{begin}:0", "$A:0", end and f"{end}:0") if part)
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
