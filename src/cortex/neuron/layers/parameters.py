"""The tensors of a model, and which tensor of the checkpoint fills each.

Layers allocate through `Parameters` as they are built. `models/sizes.py` computes the same bytes beforehand, without
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import torch
from torch import Tensor

from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.layouts import DeviceLayout, MatrixLayout, StackLayout, hosted_layout, stack_layout
from cortex.neuron.kernels.matrix import ExpertMatrix, Matrix, StackedMatrix, StoredMatrix
from cortex.neuron.kernels.moe.host_memory import HostMatrix, MakeMatrix
from cortex.neuron.kernels.moe.host_team import HostTeam
from cortex.neuron.kernels.quantised.layout import OrderedLayout
from cortex.neuron.kernels.storages import empty_device_matrix, empty_matrix, empty_stack
from cortex.neuron.layers.parallel import SINGLE_RANK, ParallelGroup


@dataclass(frozen=True, slots=True)
class Binding:
    """A tensor of the checkpoint and the memory that it fills."""

    source: str
    destination: Tensor
    """A view into a parameter, of the source's shape (after `transform`)."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Applied to the source before it is copied, if the layout of the checkpoint differs."""
    shape: tuple[int, ...] | None = None
    """The shape of the source, if `transform` changes it; None: that of `destination`. A load rejects any other."""
    parts: tuple[Binding, ...] = ()
    """Bindings that fill the same memory if the checkpoint has no `source` but its parts."""

    def chosen_from(self, names: Container[str]) -> Iterator[Binding]:
        """Itself, or those of its parts that fill it from a checkpoint with tensors of these names."""
        if not self.parts or self.source in names:
            yield self
            return
        for part in self.parts:
            yield from part.chosen_from(names)


@dataclass(frozen=True, slots=True)
class PackedBinding:
    """A tensor of the checkpoint that fills rows of a packed matrix, starting at `first_row`."""

    source: str
    matrix: StoredMatrix
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class HostedBinding:
    """The same for a matrix in host memory."""

    source: str
    matrix: HostMatrix
    first_row: int
    num_rows: int


class Parameters:
    """Allocates the tensors of a model on one device and lists the bindings that fill them."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        packing: Mapping[str, MatrixLayout] | None = None,
        group: ParallelGroup = SINGLE_RANK,
        host: HostTeam | None = None,
    ) -> None:
        """`packing`: in which layouts tensors of the checkpoint are kept quantised, by name; others are dense. `group`:
        the ranks that the model is divided among. The layers get the sizes of this rank's share. `host`: computes
        weights in host memory; None without any."""
        self.host = host
        self.device = device
        self.group = group
        self.dtype = dtype
        self.bindings: list[Binding] = []
        self.packed_bindings: list[PackedBinding] = []
        self.hosted_bindings: list[HostedBinding] = []
        self.num_bytes = 0
        self.packing = {} if packing is None else packing

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
        return [chosen for binding in self.bindings for chosen in binding.chosen_from(names)]

    def load(self, source: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter filled by one tensor of the checkpoint, without a transform."""
        tensor = self.empty(*shape, dtype=dtype)
        self.bind(source, tensor)
        return tensor

    def matrix(self, sources: Mapping[str, int], inputs: int) -> Matrix:
        """A matrix for the rows of `sources` (name → rows), in order. It is quantised if all of them are."""
        layouts = [self.packing.get(source) for source in sources]
        if None in layouts:
            return self._dense(sources, inputs)
        parts: list[Matrix] = []
        for layout, members in groupby(zip(sources.items(), layouts, strict=True), key=itemgetter(1)):
            assert layout is not None
            run = [source for source, _ in members]
            is_whole = not any(rows % layout.row_block for _, rows in run[:-1])
            parts += [self._quantised(layout, part, inputs) for part in ([run] if is_whole else zip(run))]
        return parts[0] if len(parts) == 1 else StackedMatrix(parts)

    def quantised_copy(self, layout: MatrixLayout, source: str, rows: int, inputs: int) -> Matrix:
        """Another matrix of the rows of `source`, in `layout`."""
        return self._quantised(layout, [(source, rows)], inputs)

    def stack_layout(self, experts: Iterable[Collection[str]]) -> StackLayout | None:
        """The layout of one matrix with the rows of all experts, by the names of each; None: they cannot be in one."""
        return stack_layout([self.packing.get(source) for source in sources] for sources in experts)

    def expert_matrix(self, experts: Sequence[Mapping[str, int]], inputs: int) -> ExpertMatrix:
        """One matrix for the rows of all experts (name → rows), in order. Requires their `stack_layout`."""
        layout, sources = self.stack_layout(experts), [source for names in experts for source in names.items()]
        assert layout is not None
        rows = sum(count for _, count in sources)
        matrix = empty_stack(layout, rows, inputs, self.device, num_experts=len(experts))
        self._bind_rows(matrix, sources)
        return matrix

    def divided_matrix(
        self, experts: Sequence[Mapping[str, int]], inputs: int, num_hosted: int
    ) -> tuple[ExpertMatrix, HostMatrix]:
        """The rows of each expert (name → rows), in order: the last ones in host memory, with a spare place. Quantised
        if all of them are in one layout."""
        num_held = len(experts) - num_hosted
        layout = self.stack_layout(experts)
        make = self._expert_memory(None if layout is None else hosted_layout(layout), inputs)
        held = make(num_held * sum(experts[0].values()), self.device)
        self._bind_rows(held, [source for names in experts[:num_held] for source in names.items()])
        return held, self._hosted(make, experts[num_held:], inputs, num_spare=1)

    def hosted_matrix(self, sources: Mapping[str, int], inputs: int) -> HostMatrix:
        """A matrix in host memory for the rows of `sources` (name → rows), in order. Quantised if all of them are in
        one layout."""
        layout, order = self.stack_layout([sources]), None
        if isinstance(layout, OrderedLayout):
            layout, order = layout.codes, self.empty(inputs, dtype=torch.int16)
        return self._hosted(self._expert_memory(layout, inputs), [sources], inputs, num_spare=0, order=order)

    def _expert_memory(self, layout: DeviceLayout | None, inputs: int) -> MakeMatrix:
        def make(outputs: int, device: torch.device) -> ExpertMatrix:
            if layout is None:
                return DenseMatrix(torch.empty(outputs, inputs, dtype=self.dtype, device=device))
            return empty_device_matrix(layout, outputs, inputs, device)

        return make

    def _hosted(
        self,
        make: MakeMatrix,
        experts: Sequence[Mapping[str, int]],
        inputs: int,
        *,
        num_spare: int,
        order: Tensor | None = None,
    ) -> HostMatrix:
        assert self.host is not None
        places, rows = len(experts) + num_spare, sum(experts[0].values())
        hosted = HostMatrix(make, rows, places, inputs, self.device, self.host.allocate, order)
        sources = [source for names in experts for source in names.items()]
        for (source, count), end in zip(sources, accumulate(count for _, count in sources), strict=True):
            self.hosted_bindings.append(HostedBinding(source, hosted, end - count, count))
        return hosted

    def _dense(self, sources: Mapping[str, int], inputs: int) -> DenseMatrix:
        weight = self.empty(sum(sources.values()), inputs)
        for source, part in zip(sources, weight.split(list(sources.values())), strict=True):
            self.bind(source, part)
        return DenseMatrix(weight)

    def _quantised(self, layout: MatrixLayout, sources: Sequence[tuple[str, int]], inputs: int) -> StoredMatrix:
        matrix = empty_matrix(layout, sum(rows for _, rows in sources), inputs, self.device)
        self._bind_rows(matrix, sources)
        return matrix

    def _bind_rows(self, matrix: StoredMatrix, sources: Iterable[tuple[str, int]]) -> None:
        self.num_bytes += matrix.num_bytes
        first_row = 0
        for source, rows in sources:
            self.packed_bindings.append(PackedBinding(source, matrix, first_row, rows))
            first_row += rows

    @property
    def row_bindings(self) -> list[PackedBinding | HostedBinding]:
        """The tensors that fill rows of matrices, on the device and in host memory."""
        return [*self.packed_bindings, *self.hosted_bindings]

    def host_storages(self) -> list[torch.UntypedStorage]:
        """The memory of weights in host memory."""
        hosted = {id(each.matrix): each.matrix for each in self.hosted_bindings}.values()
        return [tensor.untyped_storage() for matrix in hosted for tensor in matrix.tensors if tensor.numel()]

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of all parameters on the device. Memory that several tensors share is listed once."""
        destinations = [part.destination for binding in self.bindings for part in (binding, *binding.parts)]
        destinations += [tensor for binding in self.packed_bindings for tensor in binding.matrix.tensors]
        destinations += [each.matrix.order for each in self.hosted_bindings if each.matrix.order is not None]
        return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in destinations}.values())
