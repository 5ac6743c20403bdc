"""The threads that compute weights in host memory, and the buffers through which those come to the device."""

from __future__ import annotations

import ctypes
import math
import os
import time
import weakref
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.moe.host_exchange import EXCHANGE_BUFFER, Exchanges
from cortex.neuron.kernels.moe.host_layers import MAX_ROWS, HostExperts, HostLayer
from cortex.neuron.kernels.moe.host_memory import (
    Allocate,
    Call,
    Signals,
    launch_host_function,
    mapped_on,
)
from cortex.neuron.kernels.native.library import native_library

_PROBE_TRIES, _PROBE_ROWS, _PROBE_LAYERS = 8, 8, 16
_PROBE_S, _ALIKE = 0.5, 1.1
"""A probe continues for at most this long until the three fastest tries differ by less than this factor: other programs
slow some of them."""
_USUAL_BUS = 20e9


@dataclass(frozen=True, slots=True)
class HostRates:
    """Bytes per second."""

    host: float
    """At which the CPU computes products with weights in host memory."""
    bus: float
    """From host memory to the device."""
    rows: float = math.inf
    """At which it computes them once more for a further row."""


@dataclass(frozen=True, slots=True)
class Flags:
    """How rows are handed over without the driver, on the device. See `Signals`."""

    call: Tensor
    """[1] int64"""
    given: Tensor
    """[1] int32"""
    done: Tensor
    """[1] int32"""
    progress: Tensor
    """[2] int32: how many rows of a call are written, and the turn of the last call"""


@dataclass(frozen=True, slots=True)
class Joint:
    """Where some rows of a layer are handed over, on the device, and where their results will be."""

    x: Tensor
    chosen: Tensor
    weights: Tensor
    result: Tensor
    call: Call
    flags: Flags | None
    """None: functions of the host are part of the stream, or it has none."""


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of what `native/experts.c` offers."""
    library.host_pool_start.restype = ctypes.c_void_p
    library.host_pool_start.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    library.host_pool_listen.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.host_pool_stir.argtypes = [ctypes.c_void_p]
    library.host_pool_stop.argtypes = [ctypes.c_void_p]
    library.experts_room.restype = ctypes.c_int64
    library.experts_room.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


class HostTeam:
    """The threads, and the memory through which they talk to the device: one for all layers of a model. Belongs to the
    engine thread. Rows are computed one call after the other, in the order of the steps."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        allocate: Allocate,
        buffer_experts: int,
        processors: Sequence[int],
    ) -> None:
        """`buffer_experts`: how many experts are copied to the device at a time. `processors`: those of the threads.
        Raises NotImplementedError where the functions in C cannot be compiled."""
        self.device = device
        self.allocate = allocate
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.buffer_experts = buffer_experts
        self.rates: HostRates | None = None
        self.layers: list[HostLayer] = []
        self.holds_places = False
        """Experts stay where they are. Elsewhere they are rounded differently."""
        self._buffers: dict[tuple[Any, ...], tuple[ExpertMatrix, ExpertMatrix]] = {}
        self._free: list[torch.cuda.Event | None] = [None, None]
        """For each buffer of a stream: when this step has computed with it."""
        self._turn = 0
        self._is_behind = True
        """Whether the copies of this step must still wait for the steps before it."""
        self._close: Callable[[], object] | None = None
        self._library = _declared(native_library().library)
        threads = max(1, len(processors) - (device.type == "cuda"))  # the engine thread has a core of its own
        num_bound = len(processors) if len(processors) < len(os.sched_getaffinity(0)) else 0
        self._bound = (ctypes.c_int32 * len(processors))(*processors), num_bound
        self._pool = self._library.host_pool_start(threads, *self._bound)
        if not self._pool:
            raise MemoryError("no memory for the threads that compute experts")
        self._close = weakref.finalize(self, self._library.host_pool_stop, self._pool)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._flags: Flags | None = None
        self.exchanges = Exchanges(device, self._buffer)

    def _room_bytes(self, layer: HostLayer) -> int:
        """Memory that the threads need for the most rows."""
        size: int = self._library.experts_room(ctypes.byref(layer.memory), MAX_ROWS)
        return size

    def close(self) -> None:
        """Ends the threads. No step may run."""
        if self._close is not None:
            self._close()

    def prepare(self) -> None:
        """After the last layer is built and filled: memory for inputs and results, and how fast CPU and bus are."""
        if not self.layers:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for layer in self.layers:
            layer.fill()
        self.exchanges.layers = [layer for layer in self.layers if isinstance(layer, HostExperts)]
        self._room = torch.empty(max(self._room_bytes(layer) for layer in self.layers) + 64, dtype=torch.uint8)
        width, slots = max(layer.width for layer in self.layers), max(layer.slots for layer in self.layers)
        in_bytes = MAX_ROWS * (width * self.dtype.itemsize + slots * 8)
        out_bytes = MAX_ROWS * width * self.dtype.itemsize
        buffers = [self._host_in, self._host_out, signals] = [
            self.allocate(size) for size in (in_bytes, out_bytes, ctypes.sizeof(Signals))
        ]
        mapped = buffers if self._stream is None else [mapped_on(self.device, part) for part in buffers]
        self._is_mapped = all(part is not None for part in mapped)
        self._device_in, self._device_out, seen = (
            torch.empty_like(own, device=self.device) if part is None else part
            for own, part in zip(buffers, mapped, strict=True)
        )
        signals.zero_()
        if self._is_mapped and has_kernels(seen):
            self._listen(signals, seen)
        self.rates = self.rates or self._measured()

    def _listen(self, signals: Tensor, seen: Tensor) -> None:
        """`seen`: the signals as the device has them."""
        if self._library.host_pool_listen(self._pool, signals.data_ptr(), *self._bound):
            call, given, done = (
                seen[place.offset : place.offset + place.size] for place in (Signals.call, Signals.given, Signals.done)
            )
            progress = torch.zeros(2, dtype=torch.int32, device=self.device)
            self._flags = Flags(call.view(torch.int64), given.view(torch.int32), done.view(torch.int32), progress)

    def release(self) -> None:
        """Frees the buffers on the device, while the model sleeps. Ends the copies of an exchange, which is dropped."""
        self.exchanges.drop()
        self._buffers.clear()
        self._free = [None, None]

    def between_steps(self) -> None:
        """Called before each step: the listener looks out for its rows, and hot experts go to the device."""
        if self._flags is not None:
            self._library.host_pool_stir(self._pool)
        if not self.holds_places:
            self.exchanges.advance(self._library)

    @property
    def num_exchanges(self) -> int:
        return self.exchanges.num_done

    def forget_counts(self) -> None:
        for layer in self.layers:
            layer.counts.zero_()

    def host_read_bytes(self) -> int:
        """What the CPU has read since then, each expert as often as it was chosen."""
        return sum(layer.read_bytes() for layer in self.layers)

    def computes(self, layer: HostLayer, rows: int) -> bool:
        """Whether the CPU computes this many rows; otherwise the weights are copied to the device."""
        rates = self.rates
        if rows > MAX_ROWS or rates is None:
            return False
        chosen, pairs = layer.num_chosen(rows)  # the weights of an expert are read once
        cpu_s = (chosen / rates.host + max(0.0, pairs - chosen) / rates.rows) * layer.expert_bytes
        return cpu_s <= layer.num_places * layer.expert_bytes / rates.bus

    def joint(self, layer: HostLayer, rows: int) -> Joint:
        """The way of `rows` rows to the CPU and back."""
        self._begin_step(layer)
        spans = self._spans(rows, layer.width, layer.slots)
        x, chosen, weights = (self._device_in[span] for span in spans)
        call, shape = layer.call(rows, lambda: self._call(layer, rows, spans)), (rows, layer.slots)
        return Joint(
            x.view(self.dtype).view(rows, layer.width),
            chosen.view(torch.int32).view(shape),
            weights.view(torch.float32).view(shape),
            self._device_out[: spans[0].stop].view(self.dtype).view(rows, layer.width),
            call,
            self._flags,
        )

    def _spans(self, rows: int, width: int, slots: int) -> tuple[slice, slice, slice]:
        x_bytes, size = rows * width * self.dtype.itemsize, rows * slots * 4
        return slice(0, x_bytes), slice(x_bytes, x_bytes + size), slice(x_bytes + size, x_bytes + 2 * size)

    def _begin_step(self, layer: HostLayer) -> None:
        """Events of another step say nothing here: one of both may be captured in a graph."""
        if layer is self.layers[0]:
            self._free, self._is_behind = [None, None], True

    def begin(self, joint: Joint) -> None:
        """Has the rows computed that were handed over without flags."""
        if joint.flags is not None:
            return
        if self._stream is None:
            self._library.host_experts(ctypes.byref(joint.call))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if not self._is_mapped:
                in_bytes = sum(part.nbytes for part in (joint.x, joint.chosen, joint.weights))
                self._host_in[:in_bytes].copy_(self._device_in[:in_bytes], non_blocking=True)
            launch_host_function(self._stream, self._library.host_experts, joint.call)
            if not self._is_mapped:
                out_bytes = joint.result.nbytes
                self._device_out[:out_bytes].copy_(self._host_out[:out_bytes], non_blocking=True)

    def end(self, joint: Joint) -> None:
        """Has the device wait for results without flags."""
        if joint.flags is None and self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _call(self, layer: HostLayer, rows: int, spans: Sequence[slice]) -> Call:
        x, *choice = (self._host_in.data_ptr() + span.start for span in spans)
        return Call(
            ctypes.addressof(layer.memory),
            self._pool,
            x,
            *(layer.fixed_choice or choice),
            self._host_out.data_ptr(),
            -(-self._room.data_ptr() // 64) * 64,
            rows,
        )

    def streamed(self, layer: HostLayer, compute: Callable[[ExpertMatrix, ExpertMatrix, slice], None]) -> None:
        """Calls `compute` with the weights of some places at a time, gate_up and down, which lie on the device. Those
        that come next are copied meanwhile, also those of the next layer."""
        self._begin_step(layer)
        for first in range(0, layer.total_places, layer.stream_places):
            count, which = min(layer.stream_places, layer.total_places - first), self._turn % EXCHANGE_BUFFER
            self._turn += 1
            buffers = self._buffer(layer, which)
            pairs = [
                (part[: len(own)], own)
                for matrix, buffer in zip(layer.matrices, buffers, strict=True)
                for own, part in zip(matrix.places(first, count), buffer.tensors, strict=True)
            ]
            if self._stream is None:
                for part, own in pairs:
                    part.copy_(own)
                compute(*buffers, slice(first, first + count))
                continue
            main = torch.cuda.current_stream(self.device)
            if self._is_behind:
                self._stream.wait_stream(main)
                self._is_behind = False
            if (event := self._free[which]) is not None:
                self._stream.wait_event(event)
            with torch.cuda.stream(self._stream):
                for part, own in pairs:
                    part.copy_(own, non_blocking=True)
            main.wait_event(self._stream.record_event())
            compute(*buffers, slice(first, first + count))
            self._free[which] = main.record_event()

    def _buffer(self, layer: HostLayer, which: int) -> tuple[ExpertMatrix, ExpertMatrix]:
        """Two for streaming, and one for exchanges; layers of one kind share them."""
        key = (which, *layer.kind)
        if key not in self._buffers:
            count = layer.stream_places if which < EXCHANGE_BUFFER else 1
            gate_up, down = (matrix.make(count * matrix.rows, self.device) for matrix in layer.matrices)
            self._buffers[key] = gate_up, down
        return self._buffers[key]

    def _measured(self) -> HostRates:
        """How fast rows that choose the same experts are, in several layers one after the other, so that no cache has
        them. Threads of torch would keep the cores busy: nothing here uses them."""
        layer = self.layers[0]
        layers = [each for each in self.layers if each.kind == layer.kind][:_PROBE_LAYERS]
        read_bytes = len(layers) * min(layer.slots, layer.num_places) * layer.expert_bytes
        one_s, several_s = (self._probed_s(layers, rows) for rows in (1, _PROBE_ROWS))
        bus = _USUAL_BUS
        if self._stream is not None:
            bus = layer.total_places * layer.expert_bytes / self._streamed_s(layer)
        more_s = several_s - one_s
        return HostRates(read_bytes / one_s, bus, read_bytes * (_PROBE_ROWS - 1) / more_s if more_s > 0 else math.inf)

    def _probed_s(self, layers: Sequence[HostLayer], rows: int) -> float:
        """Seconds for as many experts of each of these layers as a row chooses, the shortest of several tries."""
        memory, calls = self._host_in.numpy(), []
        memory[:] = 0
        for layer in layers:
            spans = self._spans(rows, layer.width, layer.slots)
            calls.append(self._call(layer, rows, spans))
            layer.memory.is_counted = 0
        layer, spans = layers[0], self._spans(rows, layers[0].width, layers[0].slots)
        chosen = np.full((rows, layer.slots), -1, np.int32)
        in_host = np.flatnonzero(layer.place_of.numpy() >= 0)[: layer.slots]  # the first layer has the fewest there
        chosen[:, : len(in_host)] = in_host
        memory[spans[1]] = chosen.view(np.uint8).reshape(-1)
        memory[spans[2]] = np.ones(chosen.shape, np.float32).view(np.uint8).reshape(-1)
        times: list[float] = []
        deadline_s = time.perf_counter() + _PROBE_S
        while len(times) < _PROBE_TRIES or (times[2] > _ALIKE * times[0] and time.perf_counter() < deadline_s):
            start = time.perf_counter()
            for call in calls:
                self._library.host_experts(ctypes.byref(call))
            insort(times, time.perf_counter() - start)
        for layer in layers:
            layer.memory.is_counted = 1
        return times[0]

    def _streamed_s(self, layer: HostLayer) -> float:
        """Seconds to copy the weights of a layer to the device."""
        times = []
        for _ in range(_PROBE_TRIES):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            self.streamed(layer, lambda *_: None)
            torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return min(times)
