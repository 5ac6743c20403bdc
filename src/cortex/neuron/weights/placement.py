"""The destinations of a checkpoint's tensors, and the pieces in which they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Final, Protocol, runtime_checkable

import torch

from cortex.neuron.weights.checkpoint import Checkpoint
from cortex.neuron.weights.decode import column_order, decode, decode_float8, decode_groups, has_groups
from cortex.neuron.weights.errors import Malformed, TensorMissing
from cortex.neuron.weights.stored import StoredTensor

_NAN = 0x7F
"""The code of NaN in FP8 (e4m3), without its sign. Some kernels would read it as 480."""


class ScaleCheck:
    """The check of one tensor. On a GPU its result is read once, after the last piece: reading it waits for the GPU."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.finite: torch.Tensor | None = None
        """[] bool on a GPU, or None: all is checked."""

    def add(self, scales: torch.Tensor) -> None:
        """`scales`: values of one piece; if a scale is not finite, one of them is not. Raises Malformed on the CPU."""
        self._add(torch.isfinite(scales.sum()))

    def add_float8(self, codes: torch.Tensor) -> None:
        """`codes`: weights of one piece. Raises Malformed on the CPU."""
        self._add((codes.view(torch.uint8) & _NAN).amax() != _NAN)

    def _add(self, finite: torch.Tensor) -> None:
        """finite: [] bool"""
        if finite.device.type == "cpu":
            if not bool(finite):
                raise self.error()
        else:
            self.finite = finite if self.finite is None else self.finite & finite

    def error(self) -> Malformed:
        stored = self._stored
        what = "weights" if stored.format == "FP8" else "scales"  # its scales are checked where they are read
        return Malformed(
            f"{stored.file.path}: {stored.name} in {stored.format} has {what} that are not finite; download it again"
        )


def finish(checks: Iterable[ScaleCheck]) -> None:
    """Raises Malformed if a scale or a weight was not finite."""
    pending = [(check, check.finite) for check in checks if check.finite is not None]
    if not pending:
        return
    results: list[bool] = torch.stack([finite for _, finite in pending]).tolist()
    for (check, _), is_finite in zip(pending, results, strict=True):
        if not is_finite:
            raise check.error()


Transform = Callable[[torch.Tensor], torch.Tensor]

_BLOCK_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Sizes of reads of a tensor."""

    num_bytes: int = 8 << 20
    cached_weights: int = 512 << 10
    """Bytes of a piece that the CPU quantises or repacks: enough to amortise the fixed cost of operations, few enough
    that several copies fit the caches."""
    pinned_bytes: int = 128 << 20
    """Of all pieces on their way to a GPU."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor of the checkpoint and its destination.

    `destination` is already allocated, on any device and in any dtype, and may be a slice of a larger tensor.
    `select` selects a part of the tensor, one slice per dimension. Only the rows that it needs are read.
    `transform` runs on the device of the destination, on the complete selection, and returns a tensor of the shape of
    the destination. Until it returns, the device holds the tensor twice.
    `shape` is what the selection must have, if `transform` changes it; None: that of the destination.
    """

    name: str
    destination: torch.Tensor
    select: tuple[slice, ...] = ()
    transform: Transform | None = None
    shape: tuple[int, ...] | None = None


class MatrixSink(Protocol):
    """A quantised matrix in memory that accepts rows."""

    @property
    def device(self) -> torch.device: ...

    @property
    def inputs(self) -> int: ...

    @property
    def keeps(self) -> str:
        """The form of rows that it keeps without rounding them again: `codes`, `ordered` codes, `float8` or
        `values`."""
        ...

    def put_values(self, first_row: int, values: torch.Tensor) -> None:
        """Quantise dense rows and write them. values: [rows, inputs]"""

    def put_codes(self, first_row: int, code: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> None:
        """Write rows of `scale · code + minimum`. code: [rows, inputs] uint8; the others: [rows, groups] float32"""

    def put_float8(self, first_row: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """codes: [rows, inputs]; scales: [rows, blocks of columns], one for each row"""


@runtime_checkable
class OrderedSink(Protocol):
    """A matrix of codes whose columns are sorted by group."""

    def put_order(self, first_row: int, columns: torch.Tensor) -> None:
        """Before the codes of rows from `first_row` on. columns: [inputs], those of the inputs in the order of the
        codes"""


@dataclass(frozen=True, slots=True)
class PackedPlacement:
    """One tensor of the checkpoint, quantised or dense, and the rows of a packed matrix that it fills."""

    name: str
    matrix: MatrixSink
    first_row: int
    num_rows: int


class Target:
    """Writes the rows of one placement in any order. Used on the calling thread only."""

    def __init__(self, placement: Placement, stored: StoredTensor, sizes: PieceSizes) -> None:
        self.stored = stored
        self.check = ScaleCheck(stored)
        self.rows = range(stored.num_rows)[placement.select[0]] if placement.select else range(stored.num_rows)
        self._placement = placement
        self._piece_starts = self._split(sizes.num_bytes)
        self._num_left = len(self._piece_starts)
        self._assembled: torch.Tensor | None = None
        """The input of the transform, until it is complete."""

    def write(self, piece: WeightPiece, raw: torch.Tensor) -> None:
        """Decode the bytes of the piece, which are on the device of the destination, and write its rows."""
        values = decode(self.stored, raw, piece.start_group)
        if self.stored.is_blocked:
            self.check.add(values)
        place: slice | EllipsisType = ...
        if self.stored.shape:
            first_row = piece.start_group * self.stored.group_rows
            start = max(self.rows.start, first_row)
            stop = min(self.rows.stop, first_row + values.shape[0])
            place = slice(start - self.rows.start, stop - self.rows.start)
            values = values[(slice(start - first_row, stop - first_row), *self._placement.select[1:])]
        if self._placement.transform is None:
            self._placement.destination[place].copy_(values)
            return
        if self._assembled is None:
            shape = (len(self.rows), *values.shape[1:]) if self.stored.shape else ()
            self._assembled = torch.empty(shape, dtype=values.dtype, device=values.device)
        self._assembled[place].copy_(values)
        self._num_left -= 1
        if not self._num_left:
            self._finish(self._placement.transform(self._assembled))

    def _finish(self, transformed: torch.Tensor) -> None:
        name, destination = self._placement.name, self._placement.destination
        if transformed.shape != destination.shape:
            raise TensorMissing(
                f"{name} becomes {tuple(transformed.shape)}, the model needs {tuple(destination.shape)}; "
                "is it the model its config describes?"
            )
        destination.copy_(transformed)
        self._assembled = None

    def pieces(self) -> Iterator[WeightPiece]:
        """The pieces to read. They are created on demand: a stored piece would keep the target and its memory alive."""
        step, end = self._piece_starts.step, self._piece_starts.stop
        return (WeightPiece(self, start, min(step, end - start)) for start in self._piece_starts)

    def _split(self, piece_bytes: int) -> range:
        """The first group of each piece, as a range."""
        if not self.stored.num_elements:
            return range(0)
        first_group = self.rows.start // self.stored.group_rows
        last_group = -(-self.rows.stop // self.stored.group_rows)
        step = max(1, piece_bytes // self.stored.group_bytes)
        return range(first_group, last_group, step)


class PackedTarget:
    """Writes the rows of a tensor that stays quantised, in any order. Used on the calling thread only."""

    def __init__(self, placement: PackedPlacement, stored: StoredTensor, sizes: PieceSizes) -> None:
        self.stored = stored
        self.check = ScaleCheck(stored)
        self._placement = placement
        self._sizes = sizes

    def write(self, piece: WeightPiece, raw: torch.Tensor) -> None:
        """Repack or quantise the bytes of the piece, which are on the device of the matrix."""
        matrix = self._placement.matrix
        first_row = self._placement.first_row + piece.start_group * self.stored.group_rows
        is_in_order = self.stored.order is None
        if matrix.keeps == "float8" and self.stored.format == "FP8":
            codes, scales = decode_float8(self.stored, raw, piece.start_group)
            self.check.add_float8(codes)
            matrix.put_float8(first_row, codes, scales)
        elif (matrix.keeps == "ordered" or (is_in_order and matrix.keeps == "codes")) and has_groups(self.stored):
            if not is_in_order and isinstance(matrix, OrderedSink):
                matrix.put_order(first_row, column_order(self.stored))
            groups = decode_groups(self.stored, raw, piece.start_group)
            self.check.add(groups.scale + groups.minimum)
            matrix.put_codes(first_row, groups.q.flatten(1), groups.scale[..., 0], groups.minimum[..., 0])
        else:
            matrix.put_values(first_row, decode(self.stored, raw, piece.start_group))

    def pieces(self) -> Iterator[WeightPiece]:
        """The pieces to read: whole blocks of rows, which a matrix may pack together."""
        stored, count = self.stored, self.stored.num_groups
        unit = math.lcm(_BLOCK_ROWS, max(1, stored.group_rows)) // max(1, stored.group_rows)
        piece_bytes = self._sizes.num_bytes
        if self._placement.matrix.device.type == "cpu":
            piece_bytes = self._sizes.cached_weights * stored.num_bytes // max(1, stored.num_elements)
        step = unit * max(1, piece_bytes // (unit * max(1, stored.group_bytes)))
        return (WeightPiece(self, start, min(step, count - start)) for start in range(0, count, step))


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """A run of whole groups of one tensor that fits into a buffer."""

    target: Target | PackedTarget
    start_group: int
    num_groups: int

    @property
    def stored(self) -> StoredTensor:
        return self.target.stored

    @property
    def num_bytes(self) -> int:
        return self.num_groups * self.stored.group_bytes


def checked(checkpoint: Checkpoint, placement: Placement) -> StoredTensor:
    """The tensor of `placement`. Raises TensorMissing if it is absent or its selection does not fit."""
    stored = checkpoint.stored(placement.name)
    shape, select = stored.shape, placement.select
    if len(select) > len(shape) or any(part.step not in (None, 1) for part in select):
        raise ValueError(f"{placement.name} has the shape {shape}; {select} does not select a contiguous part of it")
    selected = (*(len(range(extent)[part]) for part, extent in zip(select, shape, strict=False)), *shape[len(select) :])
    wanted = tuple(placement.destination.shape) if placement.shape is None else placement.shape
    if selected != wanted:
        raise TensorMissing(
            f"{checkpoint.path}: {placement.name} gives the shape {selected}, the model needs {wanted}; "
            "is this the model its config describes?"
        )
    return stored


def checked_packed(checkpoint: Checkpoint, placement: PackedPlacement) -> StoredTensor:
    """The tensor of `placement`. Raises TensorMissing if it is absent or does not have the shape of the matrix."""
    stored = checkpoint.stored(placement.name)
    wanted = (placement.num_rows, placement.matrix.inputs)
    if stored.shape != wanted:
        raise TensorMissing(
            f"{checkpoint.path}: {placement.name} has the shape {stored.shape}, the model needs {wanted}; "
            "is this the model its config describes?"
        )
    return stored
