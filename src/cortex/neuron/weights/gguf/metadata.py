"""Parses the header of a GGUF file, metadata and tensor table, without torch and without reading weights.

The header is untrusted. Every count, length and offset is checked against the size of the file before memory is
allocated for it. An inconsistent header raises `CheckpointError`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.gguf.types import GGMLType
from cortex.neuron.weights.mapping import MappedFile

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32

# Far above any real model (a 262k-token vocabulary with scores and merges is about 20 MB and 1.1 million elements),
# far below what would exhaust the memory of the host.
_MAX_HEADER_BYTES: Final = 256 << 20
_MAX_KEYS: Final = 1 << 16
_MAX_ARRAY_ELEMENTS: Final = 4 << 20
_MAX_ARRAY_DEPTH: Final = 4
_MAX_TENSORS: Final = 1 << 17
_MAX_DIMENSIONS: Final = 4
_MAX_NAME_BYTES: Final = 1 << 16

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table. `shape` is outermost first, as in torch. `offset` is relative to the file start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a GGUF file, checked against the size of the file."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    """Values are ints, floats, strings, bools and lists, under the keys of the file."""
    tensors: Mapping[str, GGUFTensor]
    """By the names in the file, in file order."""


@dataclass(slots=True)
class HeaderBudget:
    """What the headers of a model's files may still hold, all files together."""

    num_bytes: int = _MAX_HEADER_BYTES
    keys: int = _MAX_KEYS
    elements: int = _MAX_ARRAY_ELEMENTS
    tensors: int = _MAX_TENSORS


def read_metadata(path: Path) -> GGUFFile:
    """Parse the header of the GGUF file at `path`; raises CheckpointError."""
    with MappedFile(path) as file:
        return parse_header(file)


def parse_header(file: MappedFile, budget: HeaderBudget | None = None) -> GGUFFile:
    """Parse the header of an open file, and subtract what it takes from `budget`; raises CheckpointError."""
    budget = HeaderBudget() if budget is None else budget
    header = _Header(file, budget)
    if header.take(4) != _MAGIC:
        raise Malformed(f"{file.path} is not a GGUF file (wrong magic); download it again")
    version = header.integer("I")
    if version not in _VERSIONS:
        if int.from_bytes(struct.pack(">I", version), "little") in _VERSIONS:
            raise Unsupported(f"{file.path} is a big-endian GGUF file; get the little-endian one")
        raise Unsupported(f"{file.path} has GGUF version {version}, supported are 2 and 3; convert it again")
    num_tensors = header.count("Q", budget.tensors, "tensors")
    num_keys = header.count("Q", budget.keys, "keys")

    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = header.name()
        if key in metadata:
            raise header.malformed(f"the key {key!r} appears twice")
        metadata[key] = header.value(header.integer("I"), depth=0)

    rows = [header.tensor_row() for _ in range(num_tensors)]
    budget.tensors -= num_tensors
    budget.keys -= num_keys
    budget.num_bytes -= header.position
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise header.malformed(f"general.alignment is {alignment!r}, not a power of two")
    data_start = -(-header.position // alignment) * alignment
    return GGUFFile(file.path, version, metadata, _resolve_tensors(rows, header, data_start, alignment))


@dataclass(frozen=True, slots=True)
class _TensorRow:
    name: str
    shape: tuple[int, ...]
    type_id: int
    relative_offset: int


def _resolve_tensors(rows: list[_TensorRow], header: _Header, data_start: int, alignment: int) -> dict[str, GGUFTensor]:
    """Resolve table rows to tensors. Checks that each lies within the file and that none overlap."""
    tensors: dict[str, GGUFTensor] = {}
    for row in rows:
        if row.name in tensors:
            raise header.malformed(f"the tensor {row.name!r} appears twice")
        try:
            kind = GGMLType(row.type_id)
        except ValueError:
            raise Unsupported(
                f"{header.path}: tensor {row.name!r} has the unknown number format {row.type_id}; "
                "choose a file with another quantisation, such as Q4_K_M or Q8_0"
            ) from None
        num_elements = 1
        for extent in row.shape:
            num_elements *= extent
        if row.shape[-1] % kind.block_elements:
            raise header.malformed(
                f"rows of tensor {row.name!r} have {row.shape[-1]} elements, not whole {kind.name} blocks"
            )
        num_bytes = num_elements // kind.block_elements * kind.block_bytes
        offset = data_start + row.relative_offset
        if row.relative_offset % alignment:
            raise header.malformed(f"tensor {row.name!r} is not aligned to {alignment} bytes")
        if offset + num_bytes > header.num_bytes:
            raise header.malformed(
                f"tensor {row.name!r} ends at byte {offset + num_bytes} but the file has {header.num_bytes} bytes"
            )
        tensors[row.name] = GGUFTensor(row.name, row.shape, kind, offset, num_bytes)

    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(in_order):
        if before.offset + before.num_bytes > after.offset:
            raise header.malformed(f"the tensors {before.name!r} and {after.name!r} overlap")
    return tensors


class _Header:
    """A cursor over the header. It rejects reads past the end of the file and beyond the limits above."""

    def __init__(self, file: MappedFile, budget: HeaderBudget) -> None:
        self.path = file.path
        self.num_bytes = file.num_bytes
        self.position = 0
        self._buffer = file.header(budget.num_bytes)
        self._end = min(file.num_bytes, budget.num_bytes)
        self._budget = budget

    def malformed(self, reason: str) -> Malformed:
        return Malformed(f"{self.path} is not a valid GGUF file: {reason}; download it again")

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        if num_bytes > self._end - start:
            raise self.malformed(f"the header is truncated at byte {start}")
        self.position = start + num_bytes
        return self._buffer[start : self.position]

    def integer(self, code: str) -> int:
        size = struct.calcsize("<" + code)
        value: int = struct.unpack("<" + code, self.take(size))[0]
        return value

    def count(self, code: str, limit: int, of_what: str) -> int:
        value = self.integer(code)
        if value > limit:
            raise self.malformed(f"it declares {value} {of_what}, more than the limit of {limit}")
        return value

    def string(self) -> bytes:
        return self.take(self.integer("Q"))

    def name(self) -> str:
        """A key or tensor name: at most _MAX_NAME_BYTES of strict UTF-8."""
        raw = self.take(self.count("Q", _MAX_NAME_BYTES, "bytes in a name"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.malformed(f"the name {raw[:64]!r} is not UTF-8") from None

    def value(self, type_id: int, depth: int) -> Any:
        if type_id == _STRING:
            # A token may be part of a character, which is not valid UTF-8.
            return self.string().decode(errors="replace")
        if type_id == _ARRAY:
            return self._array(depth)
        code = _SCALARS.get(type_id)
        if code is None:
            raise self.malformed(f"the value type {type_id} does not exist")
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def _array(self, depth: int) -> list[Any]:
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.malformed("arrays are nested too deeply")
        type_id = self.integer("I")
        count = self.count("Q", self._budget.elements, "elements in its arrays")
        self._budget.elements -= count
        code = _SCALARS.get(type_id)
        if code is not None:
            layout = f"<{count}{code}"
            return list(struct.unpack(layout, self.take(struct.calcsize(layout))))
        if type_id == _STRING:
            return self._strings(count)
        return [self.value(type_id, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Parses string arrays. Vocabulary and merges hold half a million strings, so this loop is optimised."""
        buffer, end, position = self._buffer, self._end, self.position
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            if start > end:
                raise self.malformed(f"the header is truncated at byte {position}")
            position = start + length_at(buffer, position)[0]
            if position > end:
                raise self.malformed(f"a string runs from byte {start} to {position}, past the header")
            strings.append(buffer[start:position].decode(errors="replace"))
        self.position = position
        return strings

    def tensor_row(self) -> _TensorRow:
        name = self.name()
        num_dimensions = self.count("I", _MAX_DIMENSIONS, f"dimensions for tensor {name!r}")
        extents = struct.unpack(f"<{num_dimensions}Q", self.take(8 * num_dimensions))
        if not extents or 0 in extents:
            raise self.malformed(f"tensor {name!r} has the shape {extents}")
        # GGUF lists the innermost dimension first.
        return _TensorRow(name, tuple(reversed(extents)), self.integer("I"), self.integer("Q"))
