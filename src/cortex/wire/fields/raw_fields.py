"""Edits fields of a JSON object and leaves every other value byte for byte as the client wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

_object_decoder = msgspec.json.Decoder(dict[str, Raw])


def replace_fields(body: bytes, values: Mapping[str, Any], *, without: Iterable[str] = ()) -> bytes:
    """`body` with other values for some fields, without others, and everything else unchanged."""
    fields = _object_decoder.decode(body)
    for name in without:
        fields.pop(name, None)
    for name, value in values.items():
        fields[name] = Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)
