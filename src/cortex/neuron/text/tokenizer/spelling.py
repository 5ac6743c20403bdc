"""The bytes that a token adds to a text, from the description of the vocabulary's decoder in `tokenizer.json`.

The library decodes whole sequences. A response is streamed, so each token has bytes of its own here: those that it adds
after other tokens. Together they are the library's text, except at its ends. The library drops the space before the
first word, and the space after the last one where a vocabulary marks the ends of words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from tokenizers import Regex, decoders

Step = Callable[[str], str | bytes]
"""The effect of one part of a decoder on a token after others. Bytes are the result; text is passed on."""

_BEFORE: Final = "a"
"""A token before the decoded one. No decoder changes it."""


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
            strip = decoders.Strip(part["content"], part["start"], part["stop"])
            return lambda token: strip.decode([token])
        case "CTC":
            frames = decoders.CTC(part["pad_token"], part["word_delimiter_token"], part["cleanup"])
            return lambda token: frames.decode([token])
    return None  # joins tokens


def _replace(old: str, new: str, token: str) -> str:
    return token.replace(old, new) if old else token


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
