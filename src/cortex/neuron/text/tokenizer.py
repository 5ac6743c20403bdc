"""Text to token ids and back, whatever file the vocabulary comes from.

Imports on a bare GPU host: the engine's grammar masks need the vocabulary too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder
from tokenizers.pre_tokenizers import PreTokenizer

from cortex.neuron.text import vocabulary
from cortex.neuron.text.errors import TextFileMalformed, TokenizerMissing, TokenizerUnsupported
from cortex.neuron.weights.gguf.metadata import read_metadata

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary and its rules. Immutable and safe to share between threads."""

    backend: Backend
    named_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and kin: the variables that chat templates expect."""
    eos_ids: tuple[int, ...]
    """Ids that end a generation, from the model's own files, in their order."""

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a model directory or a GGUF file; raises TextModelError, or CheckpointError for a bad GGUF header."""
        gguf = gguf_file(path)
        if gguf is not None:
            return cls.from_gguf(read_metadata(gguf).metadata)
        return _from_directory(path)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        return cls(vocabulary.build(metadata), vocabulary.named_tokens(metadata), vocabulary.end_ids(metadata))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows than that."""
        num_tokens = self.backend.get_vocab_size(with_added_tokens=True)
        if all(self.backend.id_to_token(token_id) is not None for token_id in range(num_tokens)):
            return num_tokens
        # Ids with gaps are rare; the whole table holds every other thread up while it is made.
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def whole_ids(self) -> frozenset[int]:
        """Ids of tokens that text is always cut around: nothing to their left depends on what is to their right."""
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which are not part of an answer's text."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def id_of(self, token: str) -> int | None:
        """The id of a token spelled exactly so."""
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, control tokens in it included, nothing added."""
        return self._ids(text, add_special_tokens=False)

    def encoding(self, text: str) -> Encoding:
        """Like `encode`, with each token's place in `text`."""
        [encoding] = self.backend.encode_batch([text], add_special_tokens=False)
        return encoding

    def encode_document(self, text: str) -> list[int]:
        """Ids of a text that stands alone, with the beginning and end that the model was trained to see around it."""
        return self._ids(text, add_special_tokens=True)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # As a batch of one: the library lets other threads run while it encodes a batch, and only then. A long prompt
        # takes a second, in which the daemon must go on answering.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` as a continuation: control tokens are spelled out, a leading space is kept."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps part of a character; none for an id outside the vocabulary."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            known = self._bytes_by_id[token_id] = self._spell(token_id)
        return known

    @cached_property
    def _bytes_by_id(self) -> dict[int, bytes]:
        return {}  # filled as tokens are seen: most of a vocabulary never is

    def _spell(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.whole_ids:
            return token.encode()
        if self._is_byte_level:
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace(vocabulary.SPACE, " ").encode()

    @cached_property
    def is_context_free(self) -> bool:
        """Whether a text between two whole tokens has the same ids wherever it stands."""
        if not self._is_byte_level:
            return False  # SentencePiece treats the beginning of a text differently
        described = _describe(self.backend.pre_tokenizer)
        return not any(step.get("add_prefix_space") for step in described.get("pretokenizers", [described]))

    @cached_property
    def _is_byte_level(self) -> bool:
        return _decoder_kind(self.backend) == "ByteLevel"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is or, where a directory has no `tokenizer.json`, that it holds."""
    if not path.is_dir():
        return path
    if (path / "tokenizer.json").exists():
        return None
    return min(path.glob("*.gguf"), default=None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, `{}` when the file is absent; raises TextFileMalformed."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise TextFileMalformed(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise TextFileMalformed(f"{path} holds no JSON object; download the model again")
    return content


def _from_directory(path: Path) -> Tokenizer:
    source = path / "tokenizer.json"
    if not source.exists():
        raise TokenizerMissing(
            f"{path} has no tokenizer.json; download the whole repository, or save the tokenizer in the fast format"
        )
    try:
        backend = Backend.from_file(str(source))
    except Exception as error:  # the library raises bare Exception for any malformed file
        raise TextFileMalformed(f"{source} is not a tokenizer ({error}); download the model again") from error
    backend.no_truncation()  # a file may carry its training set-up, and nothing is ever truncated here
    backend.no_padding()
    if _decoder_kind(backend) is None:
        raise TokenizerUnsupported(f"{source} is neither byte-level nor SentencePiece; no such model is served here")
    config = read_json(path / "tokenizer_config.json")
    _add_missing(backend, config)
    named = _named_tokens({**read_json(path / "special_tokens_map.json"), **config})
    return Tokenizer(backend, named, _eos_ids(path, backend, named))


def _describe(part: Decoder | PreTokenizer | None) -> dict[str, Any]:
    """A part of the library's tokenizer as it stands in `tokenizer.json`."""
    described: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return described


def _decoder_kind(backend: Backend) -> str | None:
    described = _describe(backend.decoder)
    kinds = {described.get("type"), *(part.get("type") for part in described.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return "ByteLevel"
    return "SentencePiece" if kinds & {"Metaspace", "ByteFallback", "Replace"} else None


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
    """From the generation config, else the model's, and always the tokenizer's own end token."""
    config = read_json(path / "config.json")
    for source in (read_json(path / "generation_config.json"), config, config.get("text_config") or {}):
        stated = source.get("eos_token_id")
        if stated is not None:
            break
    ids = stated if isinstance(stated, list) else [stated]
    if "eos_token" in named:
        ids = [*ids, backend.token_to_id(named["eos_token"])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself, or one from U+0100 upwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(shifted)}


_BYTE_OF_CHARACTER: Final = _byte_alphabet()
