"""How long an event loop would take for a body, estimated without reading it. Pure.

Time depends on the values of a body rather than on its bytes: text is skipped fast, a small object takes microseconds.
So values are counted by the characters that separate them. Text may contain these too; then the body is parsed
elsewhere although it would not have to be. What is separated is a number, and read far faster, unless it begins with a
quotation mark or a bracket.
"""

from __future__ import annotations

from cortex.parsing.pictures import may_have_pictures
from cortex.wire.dialects.anthropic_messages.billing import BILLING_HEADER

LARGE_BYTES = 1 << 17
"""Bodies from this size on are never parsed on a loop."""
LARGE_RELAYED_BYTES = 1 << 20
"""Bodies from this size on are not even read for their envelope on a loop, nor searched."""
_SMALL_BYTES = 1 << 13
"""Bodies up to this size take little, whatever they contain."""
_MAX_VALUES = 4096
"""Values that are parsed on a loop; each takes up to five microseconds."""
_SCALARS_PER_VALUE = 16
"""Numbers of an array, such as token ids, that take as long as one other value."""
_MAX_RELAYED_VALUES = 1 << 14
"""Values of a body that is edited on a loop; most are skipped."""
_MAX_BILLING_LINES = 64
_FEW = 32

_MARK = BILLING_HEADER.encode()


def is_parsed_elsewhere(body: bytes) -> bool:
    """Whether parsing or translating `body` would delay a loop."""
    num_bytes = len(body)
    if num_bytes <= _SMALL_BYTES:
        return False
    return num_bytes >= LARGE_BYTES or _has_many_surrogates(body, _MAX_VALUES - _num_values(body))


def is_edited_elsewhere(body: bytes) -> bool:
    """Whether replacing fields of `body` would delay a loop."""
    num_bytes = len(body)
    if num_bytes <= _SMALL_BYTES:
        return False
    return num_bytes >= LARGE_RELAYED_BYTES or _num_values(body) > _MAX_RELAYED_VALUES


def is_read_elsewhere(body: bytes, dialect: str, *, strip_billing: bool) -> bool:
    """Whether reading the envelope of `body`, counting its pictures, and removing its billing lines if `strip_billing`,
    would delay a loop."""
    num_bytes = len(body)
    if num_bytes <= _SMALL_BYTES:
        return False
    if num_bytes >= LARGE_RELAYED_BYTES or _has_many_surrogates(body, _MAX_VALUES):
        return True
    if may_have_pictures(body, dialect) and _num_values(body) > _MAX_VALUES:
        return True
    return strip_billing and _MARK in body and (body.count(_MARK) > _MAX_BILLING_LINES or is_edited_elsewhere(body))


def _num_values(body: bytes) -> int:
    num_containers = _count(body, b"[") + _count(body, b"{")
    num_separators = body.count(b",")
    num_nested = min(num_separators, num_containers + _count(body, b'"') // 2)
    return num_containers + _count(body, b":") + num_nested + (num_separators - num_nested) // _SCALARS_PER_VALUE


def _has_many_surrogates(body: bytes, most: int) -> bool:
    """Whether there are more than `most`. Each begins with a backslash, and single characters are counted in a third of
    the time that a search for two takes."""
    return _count(body, b"\\") > most and body.count(b"\\ud") + body.count(b"\\uD") > most


def _count(body: bytes, character: bytes) -> int:
    """`body.count(character)`, which looks at every byte: a few are found in a tenth of its time."""
    place = -1
    for num_before in range(_FEW):
        place = body.find(character, place + 1)
        if place < 0:
            return num_before
    return _FEW + body.count(character, place + 1)
