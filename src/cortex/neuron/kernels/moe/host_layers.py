"""The layers of a model that have weights in host memory: routed experts, or a whole feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activation_number
from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.moe.host_memory import Call, HostMatrix, Layer, Swap

MAX_ROWS = 64
"""Most rows that the CPU computes."""


class HostLayer:
    """Both matrices of one layer in host memory, one place for each expert there, as C sees them. A block that is no
    mixture is one expert, which every row has chosen with a weight of one."""

    stream_places: int
    """How many places are copied to the device at a time."""
    first = 0
    """The first expert of this rank."""

    def __init__(
        self,
        gate_up: HostMatrix,
        down: HostMatrix,
        dtype: torch.dtype,
        *,
        num_experts: int,
        slots: int,
        gated: bool,
        activation: str,
    ) -> None:
        """`dtype`: of inputs and results in host memory. `num_experts`, `slots`: of the whole layer, and of a row."""
        self.matrices = (gate_up, down)
        self.width, self.inner = gate_up.inputs, down.inputs
        self.num_experts, self.slots = num_experts, slots
        self.total_places = gate_up.outputs // gate_up.rows
        """With the spare one."""
        self.num_places = self.total_places
        """Experts in host memory."""
        self.expert_bytes = (gate_up.num_bytes + down.num_bytes) // self.total_places
        self.gated, self.activation = gated, activation
        self.counts = torch.zeros(num_experts, dtype=torch.int64)
        """[experts], on the host: how often each was chosen in steps of few rows"""
        self.biases: tuple[Tensor | None, Tensor | None] = (None, None)
        """Those of all experts, on the device."""
        self.place_of = torch.zeros(num_experts, dtype=torch.int32)
        """[experts], on the host: the place of each, below 0: on the device"""
        self.memory = Layer()
        self._dtype = dtype
        self._calls: dict[int, Call] = {}
        self._held_biases: list[Tensor | None] = []

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers whose places can share a buffer."""
        return self.stream_places, *(matrix.kind for matrix in self.matrices)

    @property
    def fixed_choice(self) -> tuple[int, int] | None:
        """Addresses of experts and weights in host memory that are the same for all rows; None: a router chooses."""
        return None

    def fill(self) -> None:
        """After the weights are filled."""
        gate_up, down = self.matrices
        memory = self.memory = Layer(gate_up=gate_up.store(), down=down.store())
        self._held_biases = [None if part is None else part.to(self._dtype).cpu().contiguous() for part in self.biases]
        memory.gate_up_bias, memory.down_bias = (
            # C finds them by the number of an expert, and a rank has those of its own
            None if part is None else part.data_ptr() - self.first * matrix.rows * part.itemsize
            for part, matrix in zip(self._held_biases, self.matrices, strict=True)
        )
        memory.place_of, memory.counts = self.place_of.data_ptr(), self.counts.data_ptr()
        memory.width, memory.inner = self.width, self.inner
        memory.experts, memory.slots = self.num_experts, self.slots
        memory.is_half = self._dtype == torch.bfloat16
        memory.activation = activation_number(self.activation)
        memory.is_gated, memory.is_counted = self.gated, 1
        self._calls.clear()

    def call(self, rows: int, made: Callable[[], Call]) -> Call:
        """Kept for as long as the layer: graphs hold its address."""
        if rows not in self._calls:
            self._calls[rows] = made()
        return self._calls[rows]

    def num_chosen(self, rows: int) -> tuple[float, float]:
        """How many experts in host memory these rows choose, and in how many pairs with a row. Rows are taken to choose
        at random."""
        chosen = self.num_places * (1 - (1 - self.slots / self.num_experts) ** rows)
        return chosen, rows * self.slots * self.num_places / self.num_experts

    def read_bytes(self) -> int:
        """What the experts in host memory that were counted take, each as often as it was chosen."""
        return int(self.counts[self.place_of >= 0].sum()) * self.expert_bytes


class HostBlock(HostLayer):
    """The feed-forward block of a layer that has no experts."""

    stream_places = 1

    def __init__(
        self, gate_up: HostMatrix, down: HostMatrix, dtype: torch.dtype, *, gated: bool, activation: str
    ) -> None:
        super().__init__(gate_up, down, dtype, num_experts=1, slots=1, gated=gated, activation=activation)
        self._chosen = torch.zeros(MAX_ROWS, dtype=torch.int32)
        self._weights = torch.ones(MAX_ROWS)

    @property
    def fixed_choice(self) -> tuple[int, int]:
        return self._chosen.data_ptr(), self._weights.data_ptr()


class HostExperts(HostLayer):
    """The routed experts of a layer that are in host memory. The layer's `Experts` has the others, by their slots."""

    def __init__(
        self,
        gate_up: HostMatrix,
        down: HostMatrix,
        held: tuple[ExpertMatrix, ExpertMatrix],
        dtype: torch.dtype,
        *,
        stream_places: int,
        num_experts: int,
        slots: int,
        gated: bool,
        activation: str,
        first: int = 0,
        num_held: int | None = None,
    ) -> None:
        """`held`: the matrices of the device. A rank of a divided model has `num_held` of all experts, from `first` on.
        The first of them are on the device, the others in host memory, with a spare place."""
        super().__init__(gate_up, down, dtype, num_experts=num_experts, slots=slots, gated=gated, activation=activation)
        self.stream_places = stream_places
        self.held = held
        self.first, self.num_held = first, num_experts if num_held is None else num_held
        self.num_places = self.spare = self.total_places - 1
        device, hosted_from = held[0].device, first + self.num_held - self.num_places
        ids = torch.arange(first, first + self.num_held)
        self.expert_on = ids[: hosted_from - first]
        """[slots], on the host: the expert of each slot on the device"""
        self.expert_in = torch.cat((ids[hosted_from - first :], torch.tensor([-1])))
        """[places], on the host: the expert of each place, below 0: of the spare one"""
        slot_of = torch.full((num_experts,), -1, dtype=torch.int32)
        slot_of[self.expert_on] = torch.arange(len(self.expert_on), dtype=torch.int32)
        self.place_of.fill_(-1)
        self.place_of[self.expert_in[:-1]] = torch.arange(self.num_places, dtype=torch.int32)
        self.slot_of = slot_of.to(device)
        """[experts] int32: the slot on the device, below 0: not there"""
        self.experts_on = self.expert_on.to(device)
        self.experts_in = self.expert_in.where(self.expert_in >= 0, first).to(device)
        self.is_used = (self.expert_in >= 0).to(torch.int32).to(device)
        """[places]: 0 for the spare one, whose expert in `experts_in` does not count"""
        self.slot_biases: tuple[Tensor | None, Tensor | None] = (None, None)
        """The biases of the device's experts, by slot."""

    def fill(self) -> None:
        super().fill()
        self._place_biases()

    def biases_of(self, ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Those of some experts, [ids · rows]."""
        gate_up, down = (
            None if part is None else part.view(self.num_held, -1)[ids - self.first].flatten() for part in self.biases
        )
        return gate_up, down

    def _place_biases(self) -> None:
        """In place: graphs hold their addresses."""
        made = self.biases_of(self.experts_on)
        if self.slot_biases == (None, None):
            self.slot_biases = made
            return
        for own, new in zip(self.slot_biases, made, strict=True):
            if own is not None and new is not None:
                own.copy_(new)

    def swap(self, slot: int, place: int) -> Swap:
        """Gives two experts their new places in all tables but that of the threads, which the result changes."""
        leaves, comes, spare = int(self.expert_on[slot]), int(self.expert_in[place]), self.spare
        self.expert_on[slot], self.expert_in[place], self.expert_in[spare] = comes, -1, leaves
        self.slot_of[leaves], self.slot_of[comes], self.experts_on[slot] = -1, slot, comes
        self.experts_in[spare], self.is_used[spare], self.is_used[place] = leaves, 1, 0
        self.spare = place
        for own, every in zip(self.slot_biases, self.biases, strict=True):
            if own is not None and every is not None:
                own.view(len(self.expert_on), -1)[slot].copy_(every.view(self.num_held, -1)[comes - self.first])
        self._swap = Swap(self.place_of.data_ptr(), leaves, comes, spare)
        return self._swap
