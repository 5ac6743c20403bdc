"""Parses the header of a safetensors file and checks it against the file size, without torch."""

from __future__ import annotations

import math
from typing import Any, Final

from cortex.neuron.weights.directory import parse_json_object
from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.mapping import MappedFile
from cortex.neuron.weights.stored import StoredTensor

# A header takes about 130 bytes per tensor, so this allows more than 100,000 tensors.
_MAX_HEADER_BYTES: Final = 16 << 20
_MAX_DIMENSIONS: Final = 16

_ITEM_BYTES: Final = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


def parse_header(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors of one file by name. Together they cover its data exactly. Raises CheckpointError."""
    if file.num_bytes < 8:
        raise Malformed(f"{file.path} is too short to be a safetensors file; download it again")
    head = file.header(8 + _MAX_HEADER_BYTES)
    header_bytes = int.from_bytes(head[:8], "little")
    data_start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or data_start > file.num_bytes:
        raise Malformed(
            f"{file.path} is not a valid safetensors file: its header length is {header_bytes} bytes; download it again"
        )
    table = parse_json_object(head[8:data_start], file.path)
    tensors = {name: _tensor(file, data_start, name, entry) for name, entry in table.items() if name != "__metadata__"}
    _check_cover(file, data_start, tensors)
    return tensors


def _tensor(file: MappedFile, data_start: int, name: str, entry: Any) -> StoredTensor:
    def malformed(reason: str) -> Malformed:
        return Malformed(f"{file.path}: tensor {name[:200]!r} {reason}; download it again")

    if not isinstance(entry, dict):
        raise malformed("has no description")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise malformed("has no dtype")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise malformed("has an impossible shape")
    if not isinstance(span, list) or len(span) != 2 or not all(map(_is_count, span)):
        raise malformed("has impossible offsets")
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise Unsupported(f"{file.path}: tensor {name[:200]!r} has the unknown dtype {dtype[:40]!r}")
    start, end = span
    num_bytes = math.prod(shape) * item_bytes
    if end - start != num_bytes:
        raise malformed(f"spans {end - start} bytes, its shape and dtype need {num_bytes}")
    if data_start + end > file.num_bytes:
        raise malformed(f"ends at byte {data_start + end} of a file with {file.num_bytes}: the file is truncated")
    return StoredTensor(file, data_start + start, tuple(shape), dtype, num_bytes, name=name[:200])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_cover(file: MappedFile, data_start: int, tensors: dict[str, StoredTensor]) -> None:
    """Check that there are no overlaps and no gaps: the format forbids both, so a model file holds no other data."""
    position = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != position:
            raise Malformed(
                f"{file.path}: tensor {name[:200]!r} does not start where the previous one ends; download it again"
            )
        position += tensor.num_bytes
    if position != file.num_bytes:
        raise Malformed(f"{file.path} has {file.num_bytes - position} bytes outside of all tensors; download it again")
