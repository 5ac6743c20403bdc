"""The threads that compute a model's experts in host memory, and which expert lies where."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activation_number
from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.moe.host_memory import (
    Allocate,
    Call,
    HostMatrix,
    Layer,
    Swap,
    launch_host_function,
    mapped_on,
    processors_of_one_node,
)
from cortex.neuron.kernels.native.library import native_library

MAX_ROWS = 64
"""Most rows whose experts the CPU computes."""
_EXCHANGE_STEPS = 2
"""Steps between two looks at a layer's counts."""
_EXCHANGE_FACTOR, _EXCHANGE_LEAST = 1.5, 16
"""How much more often an expert in host memory must have been chosen than one on the device."""
_HALVED_AT = 1 << 12
"""Counts of a layer are halved from this many choices per expert on: use changes."""
_PROBE_TRIES, _PROBE_ROWS, _PROBE_LAYERS = 8, 8, 16
_USUAL_BUS = 20e9


@dataclass(frozen=True, slots=True)
class HostRates:
    """Bytes per second, and seconds."""

    host: float
    """At which the CPU computes products with experts in host memory."""
    bus: float
    """From host memory to the device."""
    row_s: float = 0.0
    """What the CPU takes for one more row of an expert."""


class Exchange(NamedTuple):
    """Two experts of a layer that change places."""

    layer: HostExperts
    slot: int
    """Of the expert on the device, which goes to the spare place."""
    place: int
    """Of the expert in host memory, which becomes the spare one."""


def exchange_of(counts: Tensor, expert_on: Tensor, expert_in: Tensor) -> tuple[int, int] | None:
    """The slot of the expert on the device that is used least, and the place of the one in host memory that is used
    most, if that pays. A place below 0 is the spare one. Pure."""
    on, place_counts = counts[expert_on], counts[expert_in.clamp(min=0)].where(expert_in >= 0, -1)
    slot, place = int(on.argmin()), int(place_counts.argmax())
    pays = int(place_counts[place]) > _EXCHANGE_FACTOR * int(on[slot]) + _EXCHANGE_LEAST
    return (slot, place) if pays else None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of what `native/experts.c` offers."""
    library.host_pool_start.restype = ctypes.c_void_p
    library.host_pool_start.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    library.host_pool_stop.argtypes = [ctypes.c_void_p]
    library.experts_room.restype = ctypes.c_int64
    library.experts_room.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


class HostTeam:
    """The threads, and the memory through which they talk to the device: one for all layers of a model. Belongs to the
    engine thread; the driver calls the functions of the host one after the other."""

    def __init__(self, device: torch.device, dtype: torch.dtype, allocate: Allocate, buffer_experts: int) -> None:
        """`buffer_experts`: how many experts are copied to the device at a time. Raises NotImplementedError where the
        functions in C cannot be compiled."""
        self.device = device
        self.allocate = allocate
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.buffer_experts = buffer_experts
        self.rates: HostRates | None = None
        self.layers: list[HostExperts] = []
        self.is_ready = False
        self._buffers: dict[tuple[Any, ...], tuple[ExpertMatrix, ExpertMatrix]] = {}
        self._free: list[torch.cuda.Event | None] = [None, None]
        self._close: Callable[[], object] | None = None
        self._pending: tuple[Exchange, torch.cuda.Event | None] | None = None
        self._num_steps = 0
        self.num_exchanges = 0
        if device.type == "meta":
            return
        self._library = _declared(native_library().library)
        processors = processors_of_one_node()
        threads = max(1, len(processors) - (device.type == "cuda"))  # the engine thread has a core of its own
        bound = (ctypes.c_int32 * len(processors))(*processors)
        num_bound = len(processors) if len(processors) < len(os.sched_getaffinity(0)) else 0
        self._pool = self._library.host_pool_start(threads, bound, num_bound)
        if not self._pool:
            raise MemoryError("no memory for the threads that compute experts")
        self._close = weakref.finalize(self, self._library.host_pool_stop, self._pool)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._background = torch.cuda.Stream(device) if device.type == "cuda" else None

    def room_of(self, layer: Any, rows: int) -> int:
        """Memory that the threads need for this many rows of a layer."""
        size: int = self._library.experts_room(layer, rows)
        return size

    def close(self) -> None:
        """Ends the threads. No step may run."""
        if self._close is not None:
            self._close()

    def prepare(self) -> None:
        """After the last layer is built and filled: memory for inputs and results, and how fast CPU and bus are."""
        if not self.layers or self.device.type == "meta":
            return
        for layer in self.layers:
            layer.fill()
        self._room = torch.empty(max(layer.room_bytes(MAX_ROWS) for layer in self.layers) + 64, dtype=torch.uint8)
        width, slots = max(layer.width for layer in self.layers), max(layer.slots for layer in self.layers)
        in_bytes = MAX_ROWS * (width * self.dtype.itemsize + slots * 8)
        out_bytes = MAX_ROWS * width * self.dtype.itemsize
        self._host_in, self._host_out = self.allocate(in_bytes), self.allocate(out_bytes)
        self._device_in, self._device_out = self._host_in, self._host_out
        self._is_mapped = True
        if self.device.type == "cuda":
            mapped = [mapped_on(self.device, part) for part in (self._host_in, self._host_out)]
            self._is_mapped = all(part is not None for part in mapped)
            self._device_in, self._device_out = (
                torch.empty_like(own, device=self.device) if part is None else part
                for own, part in zip((self._host_in, self._host_out), mapped, strict=True)
            )
        self.is_ready = True
        self.rates = self.rates or self._measured()

    def release(self) -> None:
        """Frees the buffers on the device, while the model sleeps. Ends the copies of an exchange, which is dropped."""
        if self._pending is not None and self._pending[1] is not None:
            self._pending[1].synchronize()
        self._buffers.clear()
        self._free = [None, None]
        self._pending = None

    def exchange(self) -> None:
        """Called between two steps: has hot experts change places with cold ones. The copies run in the background; a
        later call, once they are done, gives both experts their new places in the order of the steps."""
        if self._pending is not None:
            exchange, event = self._pending
            if event is None or event.query():
                self._pending = None
                self._commit(exchange)
            return
        self._num_steps += 1
        if not self.is_ready or self._num_steps % _EXCHANGE_STEPS:
            return
        layer = self.layers[self._num_steps // _EXCHANGE_STEPS % len(self.layers)]
        found = exchange_of(layer.counts, layer.expert_on, layer.expert_in)
        if int(layer.counts.sum()) > _HALVED_AT * layer.num_experts:
            layer.counts.div_(2, rounding_mode="floor")
        if found is not None:
            exchange = Exchange(layer, *found)
            self._pending = exchange, self._copied(exchange)

    def _copied(self, exchange: Exchange) -> torch.cuda.Event | None:
        """Starts to copy both experts: one into a buffer on the device, the other to the spare place."""
        if self._background is None:
            self._copy(exchange)
            return None
        self._background.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._background):
            self._copy(exchange)
            event: torch.cuda.Event = self._background.record_event()
        return event

    def _copy(self, exchange: Exchange) -> None:
        layer, slot, place = exchange
        for matrix, held, buffer in zip(layer.matrices, layer.held, self._buffer(layer, 2), strict=True):
            for own, part in zip(matrix.places(place, 1), buffer.tensors, strict=True):
                part.copy_(own, non_blocking=True)
            for own, part in zip(matrix.places(layer.spare, 1), held.tensors, strict=True):
                own.copy_(part[slot * len(own) : (slot + 1) * len(own)], non_blocking=True)

    def _commit(self, exchange: Exchange) -> None:
        layer, slot, place = exchange
        for held, buffer in zip(layer.held, self._buffer(layer, 2), strict=True):
            for own, part in zip(held.tensors, buffer.tensors, strict=True):
                own[slot * len(part) : (slot + 1) * len(part)].copy_(part)
        swap = layer.swap(slot, place)
        if self._stream is None:
            self._library.swap_places(ctypes.byref(swap))
        else:
            launch_host_function(torch.cuda.current_stream(self.device), self._library.swap_places, swap)
        self.num_exchanges += 1

    def forget_counts(self) -> None:
        for layer in self.layers:
            layer.counts.zero_()

    def host_read_bytes(self) -> int:
        """What the experts in host memory that were chosen since then take, each as often as it was chosen."""
        return sum(
            int(layer.counts[layer.expert_in[layer.expert_in >= 0]].sum()) * layer.expert_bytes for layer in self.layers
        )

    def inputs_of(self, rows: int, width: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the inputs, the experts and the weights of some rows are handed over, on the device."""
        x, chosen, weights = (self._device_in[span] for span in self._spans(rows, width, slots))
        shape = (rows, slots)
        return (
            x.view(self.dtype).view(rows, width),
            chosen.view(torch.int32).view(shape),
            weights.view(torch.float32).view(shape),
        )

    def _spans(self, rows: int, width: int, slots: int) -> tuple[slice, slice, slice]:
        x_bytes, size = rows * width * self.dtype.itemsize, rows * slots * 4
        return slice(0, x_bytes), slice(x_bytes, x_bytes + size), slice(x_bytes + size, x_bytes + 2 * size)

    def begin(self, layer: HostExperts, rows: int) -> Tensor:
        """Starts the experts of the rows that were handed over, and returns where their sum will be: after `end`."""
        spans = self._spans(rows, layer.width, layer.slots)
        out_bytes, in_bytes = spans[0].stop, spans[-1].stop
        call = layer.call(rows, lambda: self._call(layer, rows, spans))
        if self._stream is None:
            self._library.host_experts(ctypes.byref(call))
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                if not self._is_mapped:
                    self._host_in[:in_bytes].copy_(self._device_in[:in_bytes], non_blocking=True)
                launch_host_function(self._stream, self._library.host_experts, call)
                if not self._is_mapped:
                    self._device_out[:out_bytes].copy_(self._host_out[:out_bytes], non_blocking=True)
        return self._device_out[:out_bytes].view(self.dtype).view(rows, layer.width)

    def end(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _call(self, layer: HostExperts, rows: int, spans: Sequence[slice]) -> Call:
        at = self._host_in.data_ptr()
        return Call(
            ctypes.addressof(layer.memory),
            self._pool,
            *(at + span.start for span in spans),
            self._host_out.data_ptr(),
            -(-self._room.data_ptr() // 64) * 64,
            rows,
        )

    def streamed(self, layer: HostExperts, compute: Callable[[ExpertMatrix, ExpertMatrix, slice], None]) -> None:
        """Calls `compute` with the experts of some places at a time, in gate_up and down, which lie on the device."""
        main = torch.cuda.current_stream(self.device) if self._stream is not None else None
        free = self._free
        if main is not None and self._stream is not None:
            # Graphs use the buffers too, and no event outside of one says when.
            is_captured = torch.cuda.is_current_stream_capturing()
            if is_captured or layer is self.layers[0]:
                self._stream.wait_stream(main)
                free = [None, None] if is_captured else free
        for number, first in enumerate(range(0, layer.num_places + 1, self.buffer_experts)):
            count, which = min(self.buffer_experts, layer.num_places + 1 - first), number % 2
            buffers = self._buffer(layer, which)
            pairs = [
                (own, part)
                for matrix, buffer in zip(layer.matrices, buffers, strict=True)
                for own, part in zip(matrix.places(first, count), buffer.tensors, strict=True)
            ]
            if main is None or self._stream is None:
                for own, part in pairs:
                    part[: len(own)].copy_(own)
            else:
                if (event := free[which]) is not None:
                    self._stream.wait_event(event)
                with torch.cuda.stream(self._stream):
                    for own, part in pairs:
                        part[: len(own)].copy_(own, non_blocking=True)
                main.wait_event(self._stream.record_event())
            compute(*buffers, slice(first, first + count))
            if main is not None:
                free[which] = main.record_event()

    def _buffer(self, layer: HostExperts, which: int) -> tuple[ExpertMatrix, ExpertMatrix]:
        """Two for streaming, and one for exchanges; layers of one kind share them."""
        key = (which, *(matrix.kind for matrix in layer.matrices))
        if key not in self._buffers:
            count = self.buffer_experts if which < 2 else 1
            gate_up, down = (matrix.make(count * matrix.rows, self.device) for matrix in layer.matrices)
            self._buffers[key] = gate_up, down
        return self._buffers[key]

    def _measured(self) -> HostRates:
        """How fast rows that choose the same experts are, in several layers one after the other, so that no cache has
        them. Threads of torch would keep the cores busy: nothing here uses them."""
        layers = self.layers[:_PROBE_LAYERS]
        pairs = sum(min(layer.slots, layer.num_places) for layer in layers)
        expert_bytes = sum(min(layer.slots, layer.num_places) * layer.expert_bytes for layer in layers) / pairs
        one_s, several_s = (self._probed_s(layers, rows) for rows in (1, _PROBE_ROWS))
        bus = _USUAL_BUS
        if self._stream is not None:
            bus = layers[0].num_places * layers[0].expert_bytes / self._streamed_s(layers[0])
        more_s = max(0.0, several_s - one_s) / ((_PROBE_ROWS - 1) * pairs)
        return HostRates(pairs * expert_bytes / one_s, bus, more_s)

    def _probed_s(self, layers: Sequence[HostExperts], rows: int) -> float:
        """Seconds for the experts of the first places of these layers, the shortest of several tries."""
        memory, calls = self._host_in.numpy(), []
        memory[:] = 0
        for layer in layers:
            spans = self._spans(rows, layer.width, layer.slots)
            calls.append(self._call(layer, rows, spans))
            layer.memory.is_counted = 0
        layer, spans = layers[0], self._spans(rows, layers[0].width, layers[0].slots)
        chosen = np.full((rows, layer.slots), -1, np.int32)
        count = min(layer.slots, layer.num_places)
        chosen[:, :count] = layer.num_experts - 1 - np.arange(count)  # before the first exchange, the last experts
        memory[spans[1]] = chosen.view(np.uint8).reshape(-1)
        memory[spans[2]] = np.ones(chosen.shape, np.float32).view(np.uint8).reshape(-1)
        times = []
        for _ in range(_PROBE_TRIES):
            start = time.perf_counter()
            for call in calls:
                self._library.host_experts(ctypes.byref(call))
            times.append(time.perf_counter() - start)
        for layer in layers:
            layer.memory.is_counted = 1
        return min(times)

    def _streamed_s(self, layer: HostExperts) -> float:
        """Seconds to copy the experts of a layer to the device."""
        times = []
        for _ in range(_PROBE_TRIES):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            self.streamed(layer, lambda *_: None)
            torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return min(times)


class HostExperts:
    """Those experts of one layer that lie in host memory. The layer's `Experts` has the others, by their slots."""

    def __init__(
        self,
        team: HostTeam,
        gate_up: HostMatrix,
        down: HostMatrix,
        held: tuple[ExpertMatrix, ExpertMatrix],
        num_experts: int,
        slots: int,
        *,
        gated: bool,
    ) -> None:
        """`held`: those of the device. The first experts are there, the others in host memory, with a spare place."""
        self.team = team
        self.gate_up = gate_up
        self.down = down
        self.slots = slots
        self.width = gate_up.inputs
        self.num_experts = num_experts
        self.matrices = (gate_up, down)
        self.held: tuple[ExpertMatrix, ExpertMatrix] = held
        self.num_places = gate_up.outputs // gate_up.rows - 1
        self.spare = self.num_places
        self.expert_bytes = (gate_up.num_bytes + down.num_bytes) // (self.num_places + 1)
        on_device = num_experts - self.num_places
        self.expert_in = torch.cat((torch.arange(on_device, num_experts), torch.tensor([-1])))
        """[places], on the host: the expert of each place, below 0: of the spare one"""
        self.expert_on = torch.arange(on_device)
        """[slots], on the host: the expert of each slot on the device"""
        device = team.device
        order = torch.arange(num_experts, dtype=torch.int32, device=device)
        self.slot_of = order.where(order < on_device, -1)
        """[experts] int32: the slot on the device, below 0: in host memory"""
        self.experts_on = torch.arange(on_device, device=device)
        self.experts_in = torch.arange(on_device, num_experts + 1, device=device) % num_experts
        self.is_used = (torch.arange(self.num_places + 1, device=device) < self.num_places).to(torch.int32)
        """[places]: 0 for the spare one, whose expert in `experts_in` does not count"""
        self._gated = gated
        self._place_of = (order.cpu() - on_device).clamp(min=-1) if device.type != "meta" else order
        self.counts = torch.zeros(num_experts, dtype=torch.int64)
        """[experts], on the host: how often each was chosen in steps of few rows"""
        self._calls: dict[int, Call] = {}
        self.biases: tuple[Tensor, Tensor] | None = None
        """Those of all experts, on the device, if they have some."""
        self.slot_biases: tuple[Tensor | None, Tensor | None] = (None, None)
        self._host_biases: list[Tensor] = []
        self.activation = "silu"
        team.layers.append(self)

    def fill(self) -> None:
        """After the weights are filled."""
        device = self.team.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        memory = Layer(gate_up=self.gate_up.store(), down=self.down.store())
        if self.biases is not None:
            self._host_biases = [part.to(self.team.dtype).cpu().contiguous() for part in self.biases]
            memory.gate_up_bias, memory.down_bias = (part.data_ptr() for part in self._host_biases)
            self._place_biases()
        memory.place_of, memory.counts = self._place_of.data_ptr(), self.counts.data_ptr()
        memory.width, memory.inner = self.width, self.down.inputs
        memory.experts, memory.slots = self.num_experts, self.slots
        memory.is_half = self.team.dtype == torch.bfloat16
        memory.activation = activation_number(self.activation)
        memory.is_gated, memory.is_counted = self._gated, 1
        self.memory = memory
        self._calls.clear()

    def _place_biases(self) -> None:
        """The biases of the device's experts, by slot. In place: graphs hold their addresses."""
        assert self.biases is not None
        made = [part.view(self.num_experts, -1)[self.experts_on].flatten() for part in self.biases]
        if self.slot_biases[0] is None:
            self.slot_biases = (made[0], made[1])
            return
        for own, new in zip(self.slot_biases, made, strict=True):
            assert own is not None
            own.copy_(new)

    def swap(self, slot: int, place: int) -> Swap:
        """Gives two experts their new places in all tables but that of the threads, which the result changes."""
        leaves, comes, spare = int(self.expert_on[slot]), int(self.expert_in[place]), self.spare
        self.expert_on[slot], self.expert_in[place], self.expert_in[spare] = comes, -1, leaves
        self.slot_of[leaves], self.slot_of[comes], self.experts_on[slot] = -1, slot, comes
        self.experts_in[spare], self.is_used[spare], self.is_used[place] = leaves, 1, 0
        self.spare = place
        if self.biases is not None:
            for own, every in zip(self.slot_biases, self.biases, strict=True):
                assert own is not None
                own.view(len(self.expert_on), -1)[slot].copy_(every.view(self.num_experts, -1)[comes])
        self._swap = Swap(self._place_of.data_ptr(), leaves, comes, spare)
        return self._swap

    def room_bytes(self, rows: int) -> int:
        size: int = self.team.room_of(ctypes.byref(self.memory), rows)
        return size

    def call(self, rows: int, made: Callable[[], Call]) -> Call:
        """Kept for as long as the layer: graphs hold its address."""
        if rows not in self._calls:
            self._calls[rows] = made()
        return self._calls[rows]

    def computes(self, rows: int) -> bool:
        """Whether the CPU computes the experts of this many rows; otherwise they are copied to the device."""
        rates = self.team.rates
        if rows > MAX_ROWS or rates is None:
            return False
        # each expert that a row has chosen is read once; rows are taken to choose at random
        chosen = self.num_places * (1 - (1 - self.slots / self.num_experts) ** rows)
        pairs = rows * self.slots * self.num_places / self.num_experts
        cpu_s = chosen * self.expert_bytes / rates.host + max(0.0, pairs - chosen) * rates.row_s
        return cpu_s <= self.num_places * self.expert_bytes / rates.bus
