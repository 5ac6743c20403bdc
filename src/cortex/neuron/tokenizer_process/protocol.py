"""The protocol between the daemon and a tokenizer process: requests and replies, on one connection per caller."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from cortex.neuron.text.errors import TextFileMalformed, TextModelError, TokenizerMissing, TokenizerUnsupported
from cortex.neuron.text.facts import TextFacts
from cortex.neuron.text.tokenizer.encoder import Segmented
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
"""Errors that keep their type across the connection; subclasses come before their bases."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encoded by position: both sides are always the same version."""


class Connect(_Message, frozen=True):
    """On the control socket: a connection comes with this packet, as a file descriptor."""


class Describe(_Message, frozen=True):
    """Asks for the facts in the model's text files."""


class Encode(_Message, frozen=True):
    text: str


class EncodeDocument(_Message, frozen=True):
    text: str


class EncodeSegmented(_Message, frozen=True):
    text: str


class Described(_Message, frozen=True):
    facts: TextFacts
    fingerprint: str


class Encoded(_Message, frozen=True):
    """Token ids as packed 32-bit numbers, which decode much faster than a list."""

    ids: bytes


class EncodedSegmented(_Message, frozen=True):
    ids: bytes
    cut_characters: bytes
    cut_tokens: bytes


class EncodeFailed(_Message, frozen=True):
    """The request failed; `kind` names one of `_ERROR_TYPES`."""

    kind: str
    message: str


Request = Describe | Encode | EncodeDocument | EncodeSegmented
Reply = Described | Encoded | EncodedSegmented | EncodeFailed


def fingerprint_of(facts: TextFacts) -> str:
    """A digest that is equal for equal facts, in every process."""
    return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16).hexdigest()


def packed(numbers: Sequence[int]) -> bytes:
    return array("I", numbers).tobytes()


def unpacked(numbers: bytes) -> list[int]:
    return array("I", numbers).tolist()


def encoded_segmented(segmented: Segmented) -> EncodedSegmented:
    return EncodedSegmented(packed(segmented.ids), packed(segmented.cut_characters), packed(segmented.cut_tokens))


def segmented_of(reply: EncodedSegmented) -> Segmented:
    return Segmented(*(tuple(unpacked(part)) for part in (reply.ids, reply.cut_characters, reply.cut_tokens)))


def encode_failed(error: Exception) -> EncodeFailed:
    kind = next((kind for kind in _ERROR_TYPES if isinstance(error, kind)), None)
    if kind is None:
        return EncodeFailed(TextModelError.__name__, f"{type(error).__name__}: {error}; see the node's log")
    return EncodeFailed(kind.__name__, str(error))


def error_of(reply: EncodeFailed) -> Exception:
    kind = next(kind for kind in _ERROR_TYPES if kind.__name__ == reply.kind)
    return kind(reply.message)
