"""The packed results of a tokenizer process: token ids as 32-bit integers decode much faster than lists."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from cortex.ipc.channel import ChannelMessage
from cortex.neuron.pictures.picture import PicturePlace
from cortex.neuron.text.errors import TextFileMalformed, TextModelError, TokenizerMissing, TokenizerUnsupported
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import Rendered
from cortex.neuron.text.text_files import TextFiles
from cortex.neuron.text.tokenizer.encoder import EncodedTexts
from cortex.neuron.weights.errors import CheckpointError, Malformed, Unsupported

_ERROR_TYPES = (
    TokenizerMissing,
    TokenizerUnsupported,
    TextFileMalformed,
    Malformed,
    Unsupported,
    CheckpointError,
    OSError,
    TextModelError,
)
"""Errors of a model's files that keep their type; subclasses come before their bases."""


class Described(ChannelMessage, frozen=True):
    files: TextFiles
    fingerprint: str
    reasoning_end: tuple[int, ...]
    takes_tools: tuple[bool, bool]


class PackedTexts(ChannelMessage, frozen=True):
    ids: bytes
    """The tokens of all texts, one after another."""
    lengths: tuple[int, ...]
    first_segments: tuple[int, ...]


class PackedPrompt(ChannelMessage, frozen=True):
    text: str
    ids: bytes
    turn_ends: tuple[int, ...]
    starts_in_reasoning: bool
    places: tuple[PicturePlace, ...]


class PackedPrepared(ChannelMessage, frozen=True):
    prompts: tuple[PackedPrompt, ...]
    grammar: str | None
    response_grammar: str | None
    prediction: bytes
    num_tokenised: int
    """Characters that were tokenised for it; the tokens of the others were known."""


class FilesUnreadable(ChannelMessage, frozen=True):
    """The model's text files cannot be used; `kind` names one of `_ERROR_TYPES`."""

    kind: str
    message: str


def fingerprint_of(files: TextFiles) -> str:
    """A digest that is equal for equal facts, in every process."""
    return hashlib.blake2b(msgspec.msgpack.encode(files), digest_size=16).hexdigest()


def packed(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


def pack_texts(encoded: EncodedTexts) -> PackedTexts:
    ids = b"".join(map(packed, encoded.ids))
    return PackedTexts(ids, tuple(map(len, encoded.ids)), tuple(encoded.first_segments))


def unpacked(blob: bytes) -> tuple[int, ...]:
    return tuple(array("I", blob))


def pack_prepared(prepared: Prepared, num_tokenised: int, *, with_text: bool) -> PackedPrepared:
    """`with_text`: the text of the prompts is needed, too."""
    prompts = tuple(
        PackedPrompt(
            each.text if with_text else "", packed(each.ids), each.turn_ends, each.starts_in_reasoning, each.places
        )
        for each in prepared.prompts
    )
    grammars = prepared.grammar, prepared.response_grammar
    return PackedPrepared(prompts, *grammars, packed(prepared.prediction), num_tokenised)


def unpack_prepared(reply: PackedPrepared) -> Prepared:
    prompts = tuple(
        Rendered(each.text, unpacked(each.ids), each.turn_ends, each.starts_in_reasoning, each.places)
        for each in reply.prompts
    )
    return Prepared(prompts, reply.grammar, reply.response_grammar, unpacked(reply.prediction))


def unreadable(error: Exception) -> FilesUnreadable:
    kind = next((kind for kind in _ERROR_TYPES if isinstance(error, kind)), None)
    if kind is None:
        return FilesUnreadable(TextModelError.__name__, f"{type(error).__name__}: {error}; see the node's log")
    return FilesUnreadable(kind.__name__, str(error))


def error_of(reply: FilesUnreadable) -> Exception:
    return next(kind for kind in _ERROR_TYPES if kind.__name__ == reply.kind)(reply.message)
