"""The interface of a matrix for layers, independent of the storage of its weights.

Each storage is a folder with one or more subclasses of `StoredMatrix`: `dense`, `quantised` (integer codes with scales
of groups), `float8`, and `cpu` (quantised for CPUs). `storages.py` makes one from its layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activate
from cortex.neuron.kernels.expert_pairs import ExpertChoice, PairLists
from cortex.neuron.kernels.norm import rms_norm

KeptForm = Literal["values", "codes", "ordered", "float8"]


class Prologue(NamedTuple):
    """What is computed from input rows x before a product: norm(x), or activation(gate) · up of x = [gate, up], or
    nothing. At most one of both is set."""

    norm: Tensor | None = None
    """The weights of an RMS norm, [inputs]."""
    eps: float = 0.0
    activation: str | None = None
    """One of `ACTIVATIONS`; x has twice as many columns as the matrix."""

    def applied(self, x: Tensor) -> Tensor:
        if self.activation is not None:
            return activate(x, self.activation)
        return x if self.norm is None else rms_norm(x, self.norm, self.eps)


class Epilogue(NamedTuple):
    """What is computed from a product y: y + bias + residual, or activation(gate) · up of [gate, up] = y + bias."""

    bias: Tensor | None = None
    """[outputs]"""
    residual: Tensor | None = None
    """[rows, outputs]. It may be overwritten: use the result in its place."""
    activation: str | None = None
    """One of `ACTIVATIONS`. The result has half as many columns; there is no residual."""

    def columns(self, columns: slice) -> Epilogue:
        """The part for some of the outputs. Not with an activation."""
        bias = None if self.bias is None else self.bias[columns]
        return Epilogue(bias, None if self.residual is None else self.residual[:, columns])


PLAIN: Final = Prologue()
BARE: Final = Epilogue()


class Matrix(ABC):
    """[outputs, inputs] on one device, allocated once."""

    takes_float32: ClassVar[bool] = False
    """Whether GEMMs of float32 rows are as fast as those of the model's dtype, and more exact."""

    def __init__(self, outputs: int, inputs: int, device: torch.device) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self.device = device

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the weights."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def product(
        self, x: Tensor, prologue: Prologue = PLAIN, epilogue: Epilogue = BARE, out: Tensor | None = None
    ) -> Tensor:
        """epilogue(prologue(x) Wᵀ). x: [rows, inputs] → [rows, outputs], of the dtype of x.

        `out`: for the result, maybe columns of a larger tensor; without it the memory is new, or the residual's.
        """
        if epilogue.activation is not None and not (epilogue.bias is None and self.gates(x)):
            return activate(self.product(x, prologue, epilogue._replace(activation=None)), epilogue.activation)
        if not self.fuses(prologue, x):
            x, prologue = prologue.applied(x), PLAIN
        return self._product(x, prologue, epilogue, out)

    @abstractmethod
    def fuses(self, prologue: Prologue, x: Tensor) -> bool:
        """Whether the prologue of these rows is part of the pass over the matrix, or costs nothing extra."""

    @abstractmethod
    def gates(self, x: Tensor) -> bool:
        """Whether the activation of an epilogue without a bias is part of the pass over the matrix. If not, it is
        better the prologue of the next product."""

    @abstractmethod
    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether products of rows of this dtype are rounded to half precision."""

    @abstractmethod
    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows with these ids, as an embedding looks them up. ids: [n] → [n, inputs]"""

    @abstractmethod
    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        """`product`, where the prologue is one that the matrix fuses, and an activation of the epilogue too."""


class StoredMatrix(Matrix):
    """A matrix in one storage. Its memory is undefined until all rows are put, in any order, in pieces of whole blocks
    of the layout's `row_block` rows (but the last)."""

    keeps: ClassVar[KeptForm] = "values"
    """The form of a checkpoint's rows that it keeps without rounding them again."""

    @abstractmethod
    def put_values(self, first_row: int, values: Tensor) -> None:
        """Fills rows from `first_row` on with dense rows, which it may quantise. values: [rows, inputs]"""

    def put_codes(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        """Fills rows with `scale · code + minimum`. code: [rows, inputs] uint8; the others: [rows, groups] float32"""
        grouped = code.float().unflatten(1, (scale.shape[1], -1))
        self.put_values(first_row, (grouped * scale[..., None] + minimum[..., None]).flatten(1))

    def put_float8(self, first_row: int, codes: Tensor, scales: Tensor) -> None:
        """Fills rows with eight-bit floating-point codes times their scales. codes: [rows, inputs]; scales:
        [rows, blocks of columns], one for each row"""
        width = -(-self.inputs // scales.shape[1])
        self.put_values(first_row, codes.float() * scales.repeat_interleave(width, 1)[:, : self.inputs])

    @abstractmethod
    def values(self, rows: slice = slice(None)) -> Tensor:
        """The weights of some rows, as products see them. → [rows, inputs], float32 where they are quantised"""


class ExpertMatrix(StoredMatrix):
    """A matrix that may hold the rows of several experts, equally many of each, one below the other. The rows of an
    expert are its gate's above its up's (expand), or those of its down projection (contract)."""

    max_reads = 1.3
    """GEMVs of single pairs are faster than a grouped GEMM while they read each expert at most this often. Measured on
    an H200."""

    @abstractmethod
    def expand_rows(
        self,
        x: Tensor,
        choice: ExpertChoice,
        norm: Prologue,
        activation: str | None,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """activation(norm(x) Gᵀ) · norm(x) Uᵀ, each pair on its own. Without an activation an expert has no gate, and
        the result is norm(x) Uᵀ. x: [rows, inputs]; out: [pairs, inner]

        `bias`: of all rows of the matrix, [outputs]; None: there is none.
        """

    @abstractmethod
    def contract_rows(
        self, inner: Tensor, choice: ExpertChoice, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """residual + Σ weight · inner Dᵀ over each row's experts. inner: [pairs, inputs] → [rows, hidden]"""

    @abstractmethod
    def grouped(
        self,
        x: Tensor,
        lists: PairLists,
        out: Tensor,
        *,
        pairs_per_row: int,
        activation: str | None,
        load: int,
        bias: Tensor | None = None,
    ) -> None:
        """The same for the pairs of each expert together: expands with an `activation`, else weight · x Wᵀ by pair.

        x: [pairs / pairs_per_row, inputs]; out: [pairs, outputs of an expert]. Pairs of experts that are not in the
        lists are not written. `load`: pairs that most experts have at most.
        """

    def gated_pairs(
        self,
        down: ExpertMatrix,  # noqa: ARG002
        x: Tensor,  # noqa: ARG002
        lists: PairLists,  # noqa: ARG002
        parts: Tensor,  # noqa: ARG002
        *,
        slots: int,  # noqa: ARG002
        activation: str,  # noqa: ARG002
        biases: tuple[Tensor | None, Tensor | None],  # noqa: ARG002
    ) -> bool:
        """Both products of gated experts, where that is faster than two calls of `grouped`. False: nothing is done.

        x: [tokens, inputs]; parts: [tokens · slots, hidden], weight · expert(x) by pair.
        """
        return False


class StackedMatrix(Matrix):
    """Matrices of different layouts, one below the other."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        super().__init__(sum(part.outputs for part in parts), parts[0].inputs, parts[0].device)
        self.parts = parts
        self.takes_float32 = all(part.takes_float32 for part in parts)  # type: ignore[misc]  # of each stack

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:
        return all(part.fuses(prologue, x) for part in self.parts)

    def gates(self, x: Tensor) -> bool:  # noqa: ARG002
        return False

    def rounds(self, dtype: torch.dtype) -> bool:
        return any(part.rounds(dtype) for part in self.parts)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(ids), self.inputs, dtype=dtype, device=ids.device)
        for part, span in self._spans():
            inside = (ids >= span.start) & (ids < span.stop)
            out[inside] = part.rows(ids[inside] - span.start, dtype)
        return out

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty(len(x), self.outputs, dtype=x.dtype, device=x.device)
        for part, span in self._spans():
            part.product(x, prologue, epilogue.columns(span), out[:, span])
        return out

    def _spans(self) -> Iterator[tuple[Matrix, slice]]:
        """Each part and its rows."""
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.outputs)
            first += part.outputs
