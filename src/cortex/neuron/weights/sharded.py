"""The part of a checkpoint that one rank of a group reads, as a checkpoint of its own. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortex.neuron.weights.errors import TensorMissing, Unsupported
from cortex.neuron.weights.safetensors.arranged import stacked_expert
from cortex.neuron.weights.stored import StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

    from cortex.neuron.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The part of a tensor that a rank reads: some of its rows or some of its columns, or all of it."""

    rows: tuple[range, ...] = ()
    """Runs of rows, in order; empty: all rows."""
    columns: range | None = None
    row_share: tuple[int, int] | None = None
    """(rank, ranks): an even share of the rows, however many there are; `column_share` is one of the columns."""
    column_share: tuple[int, int] | None = None
    source: str | None = None
    """The tensor's name in the checkpoint, if the rank knows it under another one."""

    def of(self, stored: StoredTensor) -> StoredTensor:
        """Raises Unsupported if the columns cut the blocks of a quantised tensor, or a share is not even."""
        rows, columns = self.rows, self.columns
        if self.row_share is not None:
            rows = (_share(stored.shape[0], self.row_share),)
        if self.column_share is not None:
            columns = _share(stored.shape[1], self.column_share)
        part = stored.with_rows(rows) if rows else stored
        return part if columns is None else part.with_columns(columns)


def _share(count: int, share: tuple[int, int]) -> range:
    rank, ranks = share
    if count % ranks:
        raise Unsupported(f"{count} rows or columns cannot be divided among {ranks} devices")
    return range(rank * count // ranks, (rank + 1) * count // ranks)


class ShardedCheckpoint:
    """See `checkpoint.Checkpoint`. Its tensors have the shapes of this rank's share; the rest is never read."""

    def __init__(self, whole: Checkpoint, slices: Mapping[str, TensorSlice | None]) -> None:
        """`slices`: by name; None: not for this rank. Tensors left out are whole. Raises Unsupported for a slice that
        is not possible. The whole checkpoint belongs to this one from now on."""
        self.path = whole.path
        self.config = whole.config
        self._whole = whole
        self._stored: dict[str, StoredTensor] = {}
        for name in whole.tensors.keys() - slices.keys():
            self._stored[name] = whole.stored(name)
        for name, part in slices.items():
            if part is not None and (source := part.source or name) in whole.tensors:
                self._stored[name] = part.of(whole.stored(source))
        self.tensors: Mapping[str, TensorInfo] = {name: TensorInfo.of(stored) for name, stored in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        from cortex.neuron.weights.decode import decode, mapped_bytes

        stored = self.stored(name)
        return decode(stored, mapped_bytes(stored))

    def stored(self, name: str) -> StoredTensor:
        stored = self._stored.get(name) or stacked_expert(self._stored, name)
        if stored is None:
            raise TensorMissing(f"{self.path} has no tensor {name!r} for this rank; is the model complete?")
        return stored

    def close(self) -> None:
        self._whole.close()
