"""Descriptions of tensors in files. They need no torch and read no weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from cortex.neuron.weights.errors import Malformed, TensorMissing, Unsupported
from cortex.neuron.weights.gguf.types import GGMLType
from cortex.neuron.weights.mapping import MappedFile

GROUP = 32
"""Columns that share a scale at least: matrices with scales in separate tensors are kept in groups of this size."""
GROUPED = frozenset({"INT4", "INT8", "MXFP4"})
"""The formats whose matrices have scales in separate tensors and are kept in such groups."""


def _runs_between(runs: tuple[range, ...], start: int, stop: int) -> Iterator[range]:
    """What is at the places `start` up to `stop` of all runs together."""
    for run in runs:
        if part := run[max(0, start) : max(0, stop)]:
            yield part
        start, stop = start - len(run), stop - len(run)


def _num_sharing(runs: tuple[range, ...], block: int, width: int = 0) -> int | None:
    """How many adjacent places of all runs together share a scale, if each block of the file has one; None if a block
    is cut. The last block may end at `width`."""
    if not any(runs):
        return block
    if min(run.start for run in runs) // block == (max(run.stop for run in runs) - 1) // block:
        return sum(map(len, runs))
    is_cut = any(run.start % block or (run.stop % block and run.stop != width) for run in runs)
    return None if is_cut else block


@dataclass(frozen=True, slots=True)
class ByteSelection:
    """Which bytes of a larger tensor in the file belong to a tensor: groups of it, and a part of each group."""

    groups: tuple[range, ...]
    """Runs of the larger tensor's groups, in order."""
    stride_bytes: int
    """The distance from one group of the larger tensor to the next."""
    skip_bytes: int = 0
    """The distance from the start of a group to the selected part."""

    def groups_between(self, start: int, stop: int) -> Iterator[range]:
        """Groups `start` up to `stop` of the selection, as runs of the larger tensor's groups."""
        return _runs_between(self.groups, start, stop)


@dataclass(frozen=True, slots=True)
class Order:
    """Which rows or columns of a matrix in the file make up a matrix, and in which order. The file is read whole."""

    width: int
    """Rows or columns in the file."""
    runs: tuple[range, ...]
    """Runs of them, in the order of the matrix."""

    def part(self, span: range) -> Order:
        """The order of some of the matrix's rows or columns."""
        return Order(self.width, tuple(_runs_between(self.runs, span.start, span.stop)))

    def keeps_groups(self, size: int) -> bool:
        """Whether groups of `size` adjacent columns stay together."""
        return not any(run.start % size or run.stop % size for run in self.runs)


class Adjustment(Enum):
    """What the file did to the values of the checkpoint; decoding undoes it."""

    PLUS_ONE = "number + 1"
    NEGATIVE_EXPONENTIAL = "-exp(number)"


@dataclass(frozen=True, slots=True)
class ScaleTensors:
    """The tensors that a quantised matrix of a published checkpoint has in addition to its codes
    (`safetensors/codes.py`)."""

    name: str
    """The matrix, for errors."""
    kind: str
    """The layout of codes in the file: `"plain"`, `"columns"`, `"packed"`, `"gptq"`, `"gptq_v2"`, `"awq"` or
    `"mxfp4"`."""
    bits: int
    rows: int
    """Rows that share a scale, and columns that do."""
    columns: int
    scale: StoredTensor
    zero: StoredTensor | None
    ordered: StoredTensor | None = None
    """The group of each column, where columns were quantised in another order (`safetensors/act_order.py`)."""
    order: str | None = None
    """Names the order of the columns by group. Equal for matrices whose columns have the same order; None: the columns
    cannot be sorted by group, or are (`is_sorted`)."""
    is_sorted: bool = False
    """Whether the matrix has its columns sorted by group, because the rows that make its inputs are."""
    row_order: StoredTensor | None = None
    """The groups by which the rows are sorted: those of the columns of the matrix that follows. The file has the
    matrix by inputs."""

    @property
    def is_transposed(self) -> bool:
        """Whether the file has the matrix by inputs, so that no row of it is in one place."""
        return self.kind in ("columns", "gptq", "gptq_v2", "awq")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the bytes of a tensor are, and how to decode them (`decode.py`).

    The bytes form `num_groups` groups of equal size. Each group decodes independently into `group_rows` whole rows. So
    a tensor of any size and format can be read in pieces.
    """

    file: MappedFile = field(repr=False)
    offset: int
    shape: tuple[int, ...]
    format: str
    """`"BF16"`, `"F32"`, `"Q4_K"` …: one namespace for dense and quantised formats."""
    num_bytes: int
    interleaved_rows: int = 0
    """Rows of one head whose rotary halves are interleaved, or of gate and up of one expert; decoding separates them.
    0: not interleaved."""
    rotated_rows: int = 0
    """The rows at the start of such a head that are interleaved; 0: all of them."""
    selection: ByteSelection | None = None
    """For a part of a larger tensor, whose first byte is at `offset`; None: the bytes are contiguous."""
    scales: ScaleTensors | None = None
    """For a matrix whose scales are tensors of their own; None: the format is complete in itself."""
    rows: Order | None = None
    """For a matrix that can only be read whole: the rows that are needed; None: all rows, as in the file."""
    columns: Order | None = None
    """For a matrix whose columns have another order in the file; None: the same order."""
    adjustment: Adjustment | None = None
    is_transposed: bool = False
    """Whether the file has the matrix by columns, so that it can be read only whole."""
    name: str = ""
    """The tensor's name in the file, for errors."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def group_rows(self) -> int:
        # A quantised vector is one group: its "rows" are single elements, and its blocks span many of them.
        if self.is_transposed or (self.scales is not None and self.scales.is_transposed):
            return self.num_rows
        if len(self.shape) == 1 and (self.interleaved_rows or self.is_blocked):
            return self.num_rows
        return self.interleaved_rows or 1

    @property
    def num_groups(self) -> int:
        return self.num_rows // self.group_rows if self.num_rows else 0

    @property
    def group_bytes(self) -> int:
        return self.num_bytes // self.num_groups if self.num_groups else 0

    def spans(self, start_group: int, num_groups: int) -> Iterator[tuple[int, int]]:
        """Where the bytes of these groups are: (offset in the file, number of bytes), in order."""
        size = self.group_bytes
        if self.selection is None:
            yield self.offset + start_group * size, num_groups * size
            return
        stride, first = self.selection.stride_bytes, self.offset + self.selection.skip_bytes
        for run in self.selection.groups_between(start_group, start_group + num_groups):
            if stride == size:
                yield first + run.start * stride, len(run) * size
            else:
                yield from ((first + group * stride, size) for group in run)

    def with_rows(self, runs: tuple[range, ...]) -> StoredTensor:
        """The tensor of these rows. Raises TensorMissing if it has no such rows, Unsupported if they are not whole
        groups."""
        self._check_inside(max((run.stop for run in runs), default=0), dimension=0)
        shape = (sum(map(len, runs)), *self.shape[1:])
        if self.scales is not None and self.scales.is_transposed:
            whole_rows = self.rows or Order(self.num_rows, (range(self.num_rows),))
            parts = tuple(part for run in runs for part in whole_rows.part(run).runs)
            return replace(self, shape=shape, rows=replace(whole_rows, runs=parts))
        num_bytes = self.num_bytes // self.num_rows * shape[0]
        if len(self.shape) == 1 and self.group_rows > 1:  # one group
            self._check_block(runs[0], self.num_rows, "elements", self._block_elements)
            start_bytes = self.num_bytes * runs[0].start // self.num_rows
            return replace(self, offset=self.offset + start_bytes, shape=shape, num_bytes=num_bytes)
        size = self.group_rows
        if any(run.start % size or run.stop % size for run in runs):
            raise Unsupported(f"{self.file.path}: heads of {size} rows cannot be divided; use fewer devices")
        whole = self._whole_selection()
        groups = tuple(part for run in runs for part in whole.groups_between(run.start // size, run.stop // size))
        return replace(self, shape=shape, num_bytes=num_bytes, selection=replace(whole, groups=groups))

    def with_halves_apart(self, head_rows: int, rotated_rows: int) -> StoredTensor:
        """The tensor whose heads have rows a0 b0 a1 b1 … in the file and a0 a1 … b0 b1 … here, of their first
        `rotated_rows`. Raises Malformed if it does not consist of such heads."""
        if self.num_rows % head_rows or rotated_rows % 2 or not 0 < rotated_rows <= head_rows:
            raise Malformed(
                f"{self.file.path}: {self.name or 'a projection'} cannot be split into heads of {head_rows} rows, of "
                f"which {rotated_rows} rotate; is it the model that its config describes?"
            )
        if self.scales is None:
            return replace(self, interleaved_rows=head_rows, rotated_rows=rotated_rows)
        halves = [*range(0, rotated_rows, 2), *range(1, rotated_rows, 2)]
        runs: list[range] = []
        for first in range(0, self.num_rows, head_rows):
            runs += [range(first + row, first + row + 1) for row in halves]
            runs.append(range(first + rotated_rows, first + head_rows))
        return self.with_rows(tuple(run for run in runs if run))

    def with_columns(self, columns: range) -> StoredTensor:
        """The tensor of these columns of a matrix. Raises TensorMissing if it has no such columns, Unsupported if they
        cut a quantised block."""
        self._check_inside(columns.stop, dimension=1)
        rows, width = self.shape
        if self.scales is not None:  # whole rows are read: the scales are in separate tensors
            is_ordered = self.order is not None  # some columns of each group
            self._check_block(columns, width, "columns", GROUP if self.format in GROUPED and not is_ordered else 1)
            part = (self.columns or Order(width, (range(width),))).part(columns)
            name = "INT_ORDERED" if is_ordered else self.format
            return replace(self, shape=(rows, len(columns)), columns=part, format=name)
        if self.columns is not None:  # whole rows are read: the columns lie apart in the file
            return replace(self, shape=(rows, len(columns)), columns=self.columns.part(columns))
        self._check_block(columns, width, "columns", self._block_elements)
        row_bytes, whole = self.num_bytes // rows, self._whole_selection()
        selection = replace(whole, skip_bytes=whole.skip_bytes + row_bytes * columns.start // width)
        num_bytes = rows * (row_bytes * len(columns) // width)
        return replace(self, shape=(rows, len(columns)), num_bytes=num_bytes, selection=selection)

    @property
    def scaled(self) -> tuple[int, int] | None:
        """How many rows and columns share a scale, for a matrix with separate scales that cuts none of their blocks,
        or is within one."""
        if self.scales is None or self.scales.is_transposed:
            return None
        rows = _num_sharing(self.rows_in_file(0, self.num_rows), self.scales.rows)
        columns = _num_sharing(self.columns_in_file(), self.scales.columns, *self.row_shape)
        return None if rows is None or columns is None else (rows, columns)

    @property
    def order(self) -> str | None:
        """Names the order of the columns by group, where the matrix has them in another one, and has all of them."""
        return self.scales.order if self.scales is not None and self.format in GROUPED else None

    def columns_in_file(self) -> tuple[range, ...]:
        """Where the columns of a matrix are in the file."""
        return self.columns.runs if self.columns is not None else (range(*self.row_shape),)

    def rows_in_file(self, first_row: int, num_rows: int) -> tuple[range, ...]:
        """Where some rows of a matrix without interleaved rows are in the file."""
        if self.rows is not None:
            return self.rows.part(range(first_row, first_row + num_rows)).runs
        if self.selection is not None:
            return tuple(self.selection.groups_between(first_row, first_row + num_rows))
        return (range(first_row, first_row + num_rows),)

    @property
    def is_blocked(self) -> bool:
        """Whether several adjacent elements are stored together."""
        return self._block_elements > 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row in the file."""
        return self.shape[1:] if self.columns is None else (self.columns.width,)

    @property
    def _block_elements(self) -> int:
        return GGMLType[self.format].block_elements if self.format in GGMLType.__members__ else 1

    def _whole_selection(self) -> ByteSelection:
        return self.selection or ByteSelection((range(self.num_groups),), self.group_bytes)

    def _check_inside(self, stop: int, dimension: int) -> None:
        if len(self.shape) <= dimension or (dimension == 1 and len(self.shape) > 2) or stop > self.shape[dimension]:
            raise TensorMissing(
                f"{self.file.path} has a tensor of the shape {self.shape}, the model needs {stop} "
                f"{'columns' if dimension else 'rows'}; is it the model that its config describes?"
            )

    def _check_block(self, part: range, whole: int, what: str, block: int) -> None:
        if part.start % block or part.stop % block:
            raise Unsupported(
                f"{self.file.path}: {whole} {what} in {self.format}, which has blocks of {block}, cannot be divided "
                f"after {part.start or part.stop}; use fewer devices, `pipeline_parallel`, or another quantisation"
            )


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that is not read yet. `dtype` names the stored format: `"BF16"`, `"F32"`, `"Q4_K"` …"""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """As stored; a quantised tensor is larger once it is read."""
    scaled: tuple[int, int] | None = None
    """How many rows and columns share a scale, where scales are separate tensors (`StoredTensor.scaled`)."""
    order: str | None = None
    """See `StoredTensor.order`."""

    @classmethod
    def of(cls, stored: StoredTensor) -> TensorInfo:
        return cls(stored.shape, stored.format, stored.num_bytes, stored.scaled, stored.order)
