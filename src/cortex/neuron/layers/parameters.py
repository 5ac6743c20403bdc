"""Where a model's tensors live and which tensor of the checkpoint fills each.

Layers allocate through `Parameters` as they are built. `models/sizes.py` computes the same bytes beforehand, without
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from cortex.neuron.kernels.products.four_bit import FourBitMatrix
from cortex.neuron.kernels.products.four_bit_size import GROUP, ROW_BLOCK
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.packing import PackedMatrix, empty_matrix


@dataclass(frozen=True, slots=True)
class Binding:
    """A tensor of the checkpoint and the memory it belongs in."""

    source: str
    destination: Tensor
    """A view into a parameter, of the source's shape (after `transform`)."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Applied to the source before it is copied, where the checkpoint's layout is not ours."""
    parts: tuple[Binding, ...] = ()
    """What fills the same memory where the checkpoint has no `source` but its pieces."""


@dataclass(frozen=True, slots=True)
class FourBitOffer:
    """Which tensors of a checkpoint a matrix in four bits can hold as they are stored, and for what it is faster."""

    bits: Mapping[str, int]
    """By the tensor's name: 4, or 8 for two planes of four."""
    max_rows: int
    """Products with so many rows are faster that way; 0: none is."""


NO_FOUR_BITS = FourBitOffer({}, 0)


@dataclass(frozen=True, slots=True)
class FourBitBinding:
    """A tensor of the checkpoint whose groups fill a matrix from `first_row` on."""

    source: str
    matrix: FourBitMatrix
    first_row: int


@dataclass(frozen=True, slots=True)
class PackingOffer:
    """Which tensors of a checkpoint are kept packed, by name, and in which layout."""

    layouts: Mapping[str, Layout]


NOTHING_PACKED = PackingOffer({})


@dataclass(frozen=True, slots=True)
class PackedBinding:
    """A tensor of the checkpoint that fills rows of a packed matrix from `first_row` on."""

    source: str
    matrix: PackedMatrix
    first_row: int
    num_rows: int


class Parameters:
    """Allocates a model's tensors on one device and keeps the list of what fills them."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        four_bits: FourBitOffer = NO_FOUR_BITS,
        packing: PackingOffer = NOTHING_PACKED,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.bindings: list[Binding] = []
        self.four_bit_bindings: list[FourBitBinding] = []
        self.packed_bindings: list[PackedBinding] = []
        self.num_bytes = 0
        self._four_bits = four_bits
        self._packing = packing

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a parameter, contents undefined until its bindings are loaded."""
        tensor = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def bind(
        self,
        source: str,
        destination: Tensor,
        transform: Callable[[Tensor], Tensor] | None = None,
        *,
        parts: Sequence[Binding] = (),
    ) -> None:
        self.bindings.append(Binding(source, destination, transform, tuple(parts)))

    def bindings_from(self, names: Container[str]) -> list[Binding]:
        """What fills this model from a checkpoint that holds tensors of these names."""
        return [
            chosen
            for binding in self.bindings
            for chosen in (binding.parts if binding.parts and binding.source not in names else (binding,))
        ]

    def load(self, source: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter filled by one tensor of the checkpoint, as it is."""
        tensor = self.empty(*shape, dtype=dtype)
        self.bind(source, tensor)
        return tensor

    def four_bit_matrix(self, sources: Mapping[str, int], inputs: int) -> FourBitMatrix | None:
        """A second form of the matrix whose rows are those of `sources` (name → rows), for products with few rows.

        None where the checkpoint stores them otherwise, or where it would not be faster.
        """
        bits = {self._four_bits.bits.get(source, 0) for source in sources}
        if not self._four_bits.max_rows or len(bits) > 1 or 0 in bits:
            return None
        if inputs % GROUP or any(rows % ROW_BLOCK for rows in sources.values()):
            return None
        planes, outputs = bits.pop() // 4, sum(sources.values())
        matrix = FourBitMatrix(
            self.empty(outputs, planes * inputs // 2, dtype=torch.uint8),
            self.empty(planes * inputs // GROUP, outputs, 2, dtype=torch.bfloat16),
            planes,
            self._four_bits.max_rows,
        )
        first_row = 0
        for source, rows in sources.items():
            self.four_bit_bindings.append(FourBitBinding(source, matrix, first_row))
            first_row += rows
        return matrix

    def packed(self, sources: Mapping[str, int], inputs: int) -> list[PackedMatrix] | None:
        """Matrices for the rows of `sources` (name → rows), in order, as the checkpoint's formats are packed.

        None where one of them is not: then all of them are dense.
        """
        layouts = [self._packing.layouts.get(source) for source in sources]
        if None in layouts:
            return None
        matrices: list[PackedMatrix] = []
        for _, members in groupby(zip(sources.items(), layouts, strict=True), key=itemgetter(1)):
            matrices.append(self.packed_stack([source for source, _ in members], inputs))
        return matrices

    def can_stack(self, sources: Sequence[tuple[str, int]]) -> bool:
        """Whether all of `sources` (name, rows) are packed, in one layout."""
        layouts = {self._packing.layouts.get(source) for source, _ in sources}
        return len(layouts) == 1 and None not in layouts

    def packed_stack(self, sources: Sequence[tuple[str, int]], inputs: int) -> PackedMatrix:
        """One matrix for the rows of `sources` (name, rows), in order. They must stack (`can_stack`)."""
        layout = self._packing.layouts[sources[0][0]]
        matrix = empty_matrix(layout, sum(rows for _, rows in sources), inputs, self.device)
        self.num_bytes += layout.num_bytes(matrix.outputs, inputs)
        first_row = 0
        for source, rows in sources:
            self.packed_bindings.append(PackedBinding(source, matrix, first_row, rows))
            first_row += rows
        return matrix

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory behind all parameters, each piece once however many tensors share it."""
        destinations = [part.destination for binding in self.bindings for part in (binding, *binding.parts)]
        destinations += [tensor for binding in self.packed_bindings for tensor in binding.matrix.tensors]
        return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in destinations}.values())
