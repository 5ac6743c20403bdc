"""The bytes of tokens, and a model's tokenizer, built with the `tokenizers` library.

The library decodes whole sequences. A response is streamed, so each token has bytes of its own here: those that it adds
after other tokens. Together they are the library's text, except at its ends. The library drops the space before the
first word, and the space after the last one where a vocabulary marks the ends of words.

Building a tokenizer blocks the interpreter for a second or two if the vocabulary is large, so the daemon does it in a
separate process. Imports on a bare GPU host: the engine's grammar masks need the library's own description.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Encoding, Regex, Tokenizer, decoders, models, processors
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder
from tokenizers.models import Model
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from cortex.neuron.families.splits import Split
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.files import MAX_TOKENIZER_BYTES, TEKKEN, gguf_file, read_json, tokenizer_file
from cortex.neuron.text.tokenizer import gguf_vocabulary
from cortex.neuron.text.tokenizer.encoder import EncodedTexts, TextsToEncode
from cortex.neuron.text.tokenizer.gguf_vocabulary import add_whole_tokens, merges_from_scores, pre_tokenizer
from cortex.neuron.text.tokenizer.vocabulary import Vocabulary, WholeToken, joined
from cortex.neuron.weights.gguf.metadata import read_metadata

Step = Callable[[str], str | bytes]
"""The effect of one part of a decoder on a token after others. Bytes are the result; text is passed on."""

_BEFORE: Final = "a"
"""A token before the decoded one. No decoder changes it."""

_TEKKEN_TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_MAX_TOKENS: Final = 1 << 20
"""Far above every published vocabulary; bounds the work for a damaged file."""
_FIRST_CONTROLS: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Those of older files, which do not list them."""


def spell(token: str, steps: tuple[Step, ...]) -> bytes:
    """The bytes of `token`, by the `steps` of its vocabulary's decoder."""
    for step in steps:
        made = step(token)
        if isinstance(made, bytes):
            return made
        token = made
    return token.encode()


def is_utf8(spelled: bytes) -> bool:
    """Whether the bytes of a token are whole characters."""
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True


def steps_of(decoder: Mapping[str, Any]) -> tuple[Step, ...]:
    """The steps of a decoder as described in `tokenizer.json`; an empty description means none."""
    if not decoder:
        return (lambda token: f" {token}",)  # the library puts a space between tokens
    steps: list[Step] = []
    is_fused = False
    for part in parts_of(decoder):
        is_fused |= part["type"] == "Fuse"
        step = _step(part)
        # After the tokens are joined, only a replacement of plain text is the same for each of them as for all.
        if step is not None and (not is_fused or "String" in part.get("pattern", ())):
            steps.append(step)
    return tuple(steps)


def parts_of(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The decoders that a decoder consists of, in their order."""
    if not decoder:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [part for each in decoder.get("decoders", ()) for part in parts_of(each)]


def _step(part: Mapping[str, Any]) -> Step | None:
    match part["type"]:
        case "ByteLevel":
            return _byte_level
        case "ByteFallback":
            return _byte_fallback
        case "Replace":
            pattern, content = part["pattern"], part["content"]
            if "String" in pattern:
                return partial(_replace, pattern["String"], content)
            expression = decoders.Replace(Regex(pattern["Regex"]), content)
            return lambda token: expression.decode([token])
        case "Metaspace":
            return partial(_replace, part["replacement"], " ")
        case "BPEDecoder":
            return partial(_replace, part["suffix"], " ")
        case "WordPiece":
            pieces = decoders.WordPiece(part["prefix"], part["cleanup"])
            return lambda token: pieces.decode([_BEFORE, token]).removeprefix(_BEFORE)
        case "Strip":
            return partial(_strip, part["content"], part["start"], part["stop"])
        case "CTC":
            frames = decoders.CTC(part["pad_token"], part["word_delimiter_token"], part["cleanup"])
            return lambda token: frames.decode([token])
    return None  # joins tokens


def _replace(old: str, new: str, token: str) -> str:
    return token.replace(old, new) if old else token


def _strip(content: str, start: int, stop: int, token: str) -> str:
    """The library's own panics if nothing but `content` is there."""
    token = token[min(start, len(token) - len(token.lstrip(content))) :]
    return token[: len(token) - min(stop, len(token) - len(token.rstrip(content)))]


def _byte_fallback(token: str) -> str | bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token
    return token


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:  # has characters outside the byte alphabet
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(shifted)}


BYTE_OF_CHARACTER: Final = _byte_alphabet()
CHARACTER_OF_BYTE: Final = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
_BYTE_LEVEL: Final = {
    # Characters below U+0100 outside the alphabet must not be taken for bytes.
    **dict.fromkeys(range(0x100), "\uffff"),
    **{ord(character): chr(byte) for character, byte in BYTE_OF_CHARACTER.items()},
}


def _load_tekken(directory: Path) -> Tokenizer:
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
    begin = _TEKKEN_TOKENS["bos_token"]
    if begin in file.controls:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0", special_tokens=[(begin, file.controls.index(begin))]
        )
    return tokenizer


_LATER_BYTES: Final = frozenset(range(0x80, 0xC0))
"""Continuation bytes of characters of several bytes."""
_IN_TEXT: Final = frozenset({*range(0xC0), *range(0xC2, 0xF5)})
"""The bytes that occur in UTF-8."""
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class LibraryTokenizer:
    """A vocabulary and its rules. Immutable and safe to share between threads."""

    backend: Backend
    named_tokens: Mapping[str, str]
    eos_ids: tuple[int, ...]

    @classmethod
    def load(cls, path: Path) -> LibraryTokenizer:
        """Reads a model directory or a GGUF file; raises TextModelError, or CheckpointError for a bad GGUF header."""
        gguf = gguf_file(path)
        if gguf is not None:
            return cls.from_gguf(read_metadata(gguf).metadata)
        return _from_directory(path)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> LibraryTokenizer:
        backend, ends = gguf_vocabulary.build(metadata), gguf_vocabulary.end_ids(metadata)
        return cls(backend, gguf_vocabulary.named_tokens(metadata), _with_harmony_ends(backend, ends))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows than that."""
        num_tokens = self.backend.get_vocab_size(with_added_tokens=True)
        if all(self.backend.id_to_token(token_id) is not None for token_id in range(num_tokens)):
            # A control token and one of the text that are spelled alike are counted as one.
            return next(token_id for token_id in count(num_tokens) if self.backend.id_to_token(token_id) is None)
        # Ids with gaps are rare; building the whole table blocks all other threads.
        # Among all tokens by spelling, a control token hides a word that is spelled alike.
        words = self.backend.get_vocab(with_added_tokens=False).values()
        return 1 + max((*words, *self.backend.get_added_tokens_decoder()), default=-1)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The part of it that can be used without the library."""
        each_spelling = list(self._spellings())
        spellings, bounds = joined(each_spelling)
        added = self.backend.get_added_tokens_decoder()
        return Vocabulary(
            spellings=spellings,
            bounds=bounds,
            whole_tokens=tuple(_whole_token(token_id, each) for token_id, each in added.items()),
            named_tokens=self.named_tokens,
            eos_ids=self.eos_ids,
            is_context_free=self._is_context_free,
            characters_per_token=self._characters_per_token(max(map(len, each_spelling), default=0)),
            silent_characters=self._silent_characters,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, including control tokens in it; adds no token."""
        return self._ids(text, add_special_tokens=False)

    def encode_document(self, text: str) -> list[int]:
        """Ids of a document, with the begin and end tokens that the model was trained with."""
        return self._ids(text, add_special_tokens=True)

    def encode_texts(self, texts: TextsToEncode) -> EncodedTexts:
        """The tokens of documents, or of pairs of a query and a document, as the model was trained with them."""
        in_pieces: dict[int, Encoding] = {}  # only the texts that need it: a batch is faster
        for index, (text, spans) in enumerate(zip(texts.texts, texts.literal, strict=True) if texts.literal else ()):
            if literal_at := self._literal_at(text, spans):
                in_pieces[index] = self._encode_literal(text, literal_at)
        inputs: list[str] | list[tuple[str, str]]
        inputs = ["" if index in in_pieces else text for index, text in enumerate(texts.texts)]
        if texts.queries:
            inputs = list(zip(texts.queries, texts.texts, strict=True))
        if texts.max_tokens is not None:
            least = self.backend.num_special_tokens_to_add(bool(texts.queries)) + 1
            direction = "left" if texts.from_left else "right"
            self.backend.enable_truncation(max(texts.max_tokens, least), direction=direction)
        try:
            found = self.backend.encode_batch(inputs, add_special_tokens=texts.adds_special)
            for index, encoding in in_pieces.items():
                found[index] = self.backend.post_process(encoding, add_special_tokens=texts.adds_special)
        finally:
            self.backend.no_truncation()
        segments = [each.type_ids.index(1) if 1 in each.type_ids else 0 for each in found] if texts.queries else []
        return EncodedTexts([each.ids for each in found], segments)

    def _literal_at(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The characters in `spans` at which control tokens begin; one may end after its span."""
        pattern, longest = self._controls
        return [
            found.start()
            for start, end in spans
            for found in pattern.finditer(text, start, end + longest - 1)
            if found.start() < end
        ]

    @cached_property
    def _controls(self) -> tuple[re.Pattern[str], int]:
        """A pattern that finds where control tokens begin, and the length of the longest. It looks ahead, because one
        may begin inside another."""
        texts = sorted(self.vocabulary.control_texts)
        # Without control tokens, nothing is found.
        return re.compile(f"(?={'|'.join(map(re.escape, texts)) or '(?!)'})"), max(map(len, texts), default=1)

    def _encode_literal(self, text: str, literal_at: Sequence[int]) -> Encoding:
        """In pieces that break the control tokens at these characters."""
        bounds = (0, *(at + 1 for at in literal_at), len(text))
        pieces = [text[start:end] for start, end in pairwise(bounds)]
        return Encoding.merge(self.backend.encode_batch(pieces, add_special_tokens=False))

    def encoding(self, text: str) -> Encoding:
        """Like `encode`, with each token's position in `text`."""
        [encoding] = self.backend.encode_batch([text], add_special_tokens=False)
        return encoding

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # As a batch of one: the library releases the GIL only while it encodes a batch.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def _spellings(self) -> Iterator[bytes]:
        steps = steps_of(_describe(self.backend.decoder))
        added = self.backend.get_added_tokens_decoder()
        for token_id in range(self.vocab_size):
            token = self.backend.id_to_token(token_id)
            spelled = b"" if token is None else spell(token, steps)
            if self._is_byte_level and token_id in added and not is_utf8(spelled):
                # The library takes the letter "ö" of an added token for a byte.
                spelled = added[token_id].content.encode()
            yield spelled

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(part["type"] == "ByteLevel" for part in parts_of(_describe(self.backend.decoder)))

    @cached_property
    def _is_context_free(self) -> bool:
        if not self._is_byte_level:
            return False  # SentencePiece treats the beginning of a text differently
        return not any(step.get("add_prefix_space") for step in _steps(self.backend.pre_tokenizer))

    def _characters_per_token(self, longest_bytes: int) -> int | None:
        """The length of the longest token, unless characters can vanish: stripped, normalised away, or unknown."""
        if any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values()):
            return None
        steps = [*_steps(self.backend.normalizer), *_steps(self.backend.pre_tokenizer)]
        if longest_bytes == 0 or not all(map(_keeps_characters, steps)):
            return None
        composes = any(step.get("type") == "NFC" for step in steps)
        # Some vocabularies lack the first byte of rare characters. The bytes after it still count, unless several
        # characters were composed into one before.
        needed = _IN_TEXT - {*range(0x80)} if composes or not self._is_byte_level else _LATER_BYTES
        if needed & self._absent_bytes:
            return None
        return (
            -(-longest_bytes * 3 // 2) if composes else longest_bytes
        )  # Ǖ has two bytes, and decomposes into three characters

    @cached_property
    def _absent_bytes(self) -> frozenset[int]:
        """Bytes that have no token of their own, so that they vanish."""
        spelled = BYTE_OF_CHARACTER if self._is_byte_level else {f"<0x{byte:02X}>": byte for byte in range(256)}
        return frozenset(byte for token, byte in spelled.items() if self.backend.token_to_id(token) is None)

    @property
    def _silent_characters(self) -> str:
        return "".join(chr(byte) for byte in sorted(self._absent_bytes) if byte < 0x80)


def _from_directory(path: Path) -> LibraryTokenizer:
    source = tokenizer_file(path)
    if source.name == TEKKEN:
        backend = _load_tekken(path)
        return LibraryTokenizer(backend, _TEKKEN_TOKENS, _eos_ids(path, backend, _TEKKEN_TOKENS))
    try:
        if source.stat().st_size > MAX_TOKENIZER_BYTES:
            limit = f"{MAX_TOKENIZER_BYTES >> 20} MiB"
            raise TextFileMalformed(f"{source} is larger than {limit}, which no tokenizer is; download the model again")
        content = source.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise TextFileMalformed(f"{source} cannot be read ({reason}); let the node's user read it") from error
    try:
        backend = Backend.from_buffer(content)
    except ValueError as error:
        raise TextFileMalformed(f"{source} is not a tokenizer ({error}); download the model again") from error
    backend.no_truncation()  # a file may contain its training set-up; nothing is truncated here
    backend.no_padding()
    config = read_json(path / "tokenizer_config.json")
    _add_missing(backend, config)
    named = _named_tokens({**read_json(path / "special_tokens_map.json"), **config})
    return LibraryTokenizer(backend, named, _eos_ids(path, backend, named))


def _describe(part: Decoder | Model | Normalizer | PreTokenizer | None) -> dict[str, Any]:
    """A part of the library's tokenizer, as in `tokenizer.json`."""
    described: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return described


def _steps(part: Normalizer | PreTokenizer | None) -> list[dict[str, Any]]:
    """The steps of a normaliser or a pre-tokeniser."""
    described = _describe(part)
    if not described:
        return []
    if described.get("type") != "Sequence":
        return [described]
    steps: list[dict[str, Any]] = described.get("normalizers") or described.get("pretokenizers") or []
    return steps


def _keeps_characters(step: Mapping[str, Any]) -> bool:
    """Whether a step loses no character of a text, except by composing several into one."""
    kind = step.get("type")
    if kind == "Split":
        return step.get("behavior") != "Removed"
    if kind == "Replace":
        return step.get("pattern") == {"String": " "} and step.get("content") == gguf_vocabulary.SPACE
    return kind in ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")


def _whole_token(token_id: int, token: AddedToken) -> WholeToken:
    is_plain = not (token.single_word or token.normalized)
    return WholeToken(token_id, token.content, token.special, is_plain, token.lstrip, token.rstrip)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED:
        token = config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named


def _add_missing(backend: Backend, config: Mapping[str, Any]) -> None:
    """Some repositories list added tokens only in `tokenizer_config.json`."""
    described = config.get("added_tokens_decoder")
    if not isinstance(described, Mapping):
        return
    present = backend.get_added_tokens_decoder()
    for key, token in sorted(described.items(), key=lambda item: int(item[0])):
        if int(key) not in present and isinstance(token, Mapping) and isinstance(token.get("content"), str):
            flags = {flag: bool(token.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            added = AddedToken(token["content"], special=bool(token.get("special", False)), **flags)
            if token.get("special"):
                backend.add_special_tokens([added])
            else:
                backend.add_tokens([added])


def _eos_ids(path: Path, backend: Backend, named: Mapping[str, str]) -> tuple[int, ...]:
    """The ids of the generation config, else of the model's config; always with the tokenizer's own end token."""
    config = read_json(path / "config.json")
    for source in (read_json(path / "generation_config.json"), config, config.get("text_config") or {}):
        stated = source.get("eos_token_id")
        if stated is not None:
            break
    ids = stated if isinstance(stated, list) else [stated]
    if "eos_token" in named:
        ids = [*ids, backend.token_to_id(named["eos_token"])]
    return _with_harmony_ends(backend, ids)


def _with_harmony_ends(backend: Backend, ids: Iterable[Any]) -> tuple[int, ...]:
    """Ends a harmony response after its answer or a call, not after each message, regardless of the file."""
    ends = [backend.token_to_id(text) for text in ("<|return|>", "<|call|>")]
    if None not in (*ends, backend.token_to_id("<|channel|>")):
        ids = [i for i in (*ids, *ends) if i != backend.token_to_id("<|end|>")]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))
