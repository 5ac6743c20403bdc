"""The tensors of a model, and which tensor of the checkpoint fills each.

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

from cortex.neuron.kernels.device_matrix import DeviceMatrix, empty_device_matrix
from cortex.neuron.kernels.products.cpu_layout import ROW_BLOCK, CpuLayout
from cortex.neuron.kernels.products.cpu_matrix import CpuMatrix, empty_cpu_matrix
from cortex.neuron.kernels.quantised.recipes import DeviceLayout
from cortex.neuron.layers.parallel import SINGLE_RANK, ParallelGroup

QuantisedMatrix = DeviceMatrix | CpuMatrix
MatrixLayout = DeviceLayout | CpuLayout


@dataclass(frozen=True, slots=True)
class Binding:
    """A tensor of the checkpoint and the memory that it fills."""

    source: str
    destination: Tensor
    """A view into a parameter, of the source's shape (after `transform`)."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Applied to the source before it is copied, if the layout of the checkpoint differs."""
    shape: tuple[int, ...] | None = None
    """Of the source, if `transform` changes it; None: that of `destination`. A load rejects every other shape."""
    parts: tuple[Binding, ...] = ()
    """Bindings that fill the same memory if the checkpoint has no `source` but its parts."""


@dataclass(frozen=True, slots=True)
class PackingOffer:
    """Which tensors of a checkpoint are kept packed, by name, and in which layout."""

    layouts: Mapping[str, MatrixLayout]


NOTHING_PACKED = PackingOffer({})


@dataclass(frozen=True, slots=True)
class PackedBinding:
    """A tensor of the checkpoint that fills rows of a packed matrix, starting at `first_row`."""

    source: str
    matrix: QuantisedMatrix
    first_row: int
    num_rows: int


class Parameters:
    """Allocates the tensors of a model on one device and lists the bindings that fill them."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        packing: PackingOffer = NOTHING_PACKED,
        group: ParallelGroup = SINGLE_RANK,
    ) -> None:
        """`group`: the ranks that the model is divided among. The layers get the sizes of this rank's share."""
        self.device = device
        self.group = group
        self.dtype = dtype
        self.bindings: list[Binding] = []
        self.packed_bindings: list[PackedBinding] = []
        self.num_bytes = 0
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
        shape: tuple[int, ...] | None = None,
        parts: Sequence[Binding] = (),
    ) -> None:
        self.bindings.append(Binding(source, destination, transform, shape, tuple(parts)))

    def bindings_from(self, names: Container[str]) -> list[Binding]:
        """The bindings that fill this model from a checkpoint with tensors of these names."""
        return [
            chosen
            for binding in self.bindings
            for chosen in (binding.parts if binding.parts and binding.source not in names else (binding,))
        ]

    def load(self, source: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter filled by one tensor of the checkpoint, without a transform."""
        tensor = self.empty(*shape, dtype=dtype)
        self.bind(source, tensor)
        return tensor

    def packed(self, sources: Mapping[str, int], inputs: int) -> list[QuantisedMatrix] | None:
        """Quantised matrices for the rows of `sources` (name → rows), in order, one per run of equal layouts.

        None if one of the sources is not packed: then all of them are dense.
        """
        layouts = [self._packing.layouts.get(source) for source in sources]
        if None in layouts:
            return None
        matrices: list[QuantisedMatrix] = []
        for layout, members in groupby(zip(sources.items(), layouts, strict=True), key=itemgetter(1)):
            run = [source for source, _ in members]
            if isinstance(layout, CpuLayout):
                is_stack = not any(rows % ROW_BLOCK for _, rows in run[:-1])
                matrices += [self._cpu_matrix(layout, part, inputs) for part in ([run] if is_stack else zip(run))]
            else:
                assert layout is not None
                matrices.append(self._device_matrix(layout, run, inputs))
        return matrices

    def can_stack(self, sources: Sequence[tuple[str, int]]) -> bool:
        """Whether all of `sources` (name, rows) are packed in the same layout of a GPU."""
        layouts = {self._packing.layouts.get(source) for source, _ in sources}
        return len(layouts) == 1 and all(isinstance(layout, DeviceLayout) for layout in layouts)

    def packed_stack(self, sources: Sequence[tuple[str, int]], inputs: int) -> DeviceMatrix:
        """One matrix for the rows of `sources` (name, rows), in order. Requires `can_stack(sources)`."""
        layout = self._packing.layouts[sources[0][0]]
        assert isinstance(layout, DeviceLayout)
        return self._device_matrix(layout, sources, inputs)

    def _device_matrix(self, layout: DeviceLayout, sources: Sequence[tuple[str, int]], inputs: int) -> DeviceMatrix:
        matrix = empty_device_matrix(layout, sum(rows for _, rows in sources), inputs, self.device)
        self._bind_rows(matrix, layout, sources)
        return matrix

    def _cpu_matrix(self, layout: CpuLayout, sources: Sequence[tuple[str, int]], inputs: int) -> CpuMatrix:
        matrix = empty_cpu_matrix(layout, sum(rows for _, rows in sources), inputs, self.device)
        self._bind_rows(matrix, layout, sources)
        return matrix

    def _bind_rows(self, matrix: QuantisedMatrix, layout: MatrixLayout, sources: Sequence[tuple[str, int]]) -> None:
        self.num_bytes += layout.num_bytes(matrix.outputs, matrix.inputs)
        first_row = 0
        for source, rows in sources:
            self.packed_bindings.append(PackedBinding(source, matrix, first_row, rows))
            first_row += rows

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of all parameters. Memory that several tensors share is listed once."""
        destinations = [part.destination for binding in self.bindings for part in (binding, *binding.parts)]
        destinations += [tensor for binding in self.packed_bindings for tensor in binding.matrix.tensors]
        return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in destinations}.values())
