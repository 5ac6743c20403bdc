"""Experts in host memory as the functions in C (`native/experts.c`) and the CUDA driver see them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.quantised.matrix import PackedMatrix

_PACKED, _BFLOAT16, _FLOAT32, _FLOAT8 = range(4)

Allocate = Callable[[int], Tensor]
"""Host memory of this many bytes, [bytes] uint8, zeros; page-locked where the device is a GPU."""
MakeMatrix = Callable[[int, torch.device], ExpertMatrix]
"""Memory for a matrix of this many rows."""


class Store(ctypes.Structure):
    """A matrix of equally many rows of each place."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "high", "scales", "table")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_int32) for name in ("form", "low_bits", "high_bits", "group", "zero", "block")),
    )


class Layer(ctypes.Structure):
    """The experts of one layer."""

    _fields_ = (
        ("gate_up", Store),
        ("down", Store),
        *((name, ctypes.c_void_p) for name in ("gate_up_bias", "down_bias", "place_of", "counts")),
        *((name, ctypes.c_int64) for name in ("width", "inner", "experts", "slots")),
        *((name, ctypes.c_int32) for name in ("is_half", "activation", "is_gated", "is_counted")),
    )


class Call(ctypes.Structure):
    """Some rows of a layer."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layer", "pool", "x", "chosen", "weights", "out", "room")),
        ("rows", ctypes.c_int64),
    )


class Signals(ctypes.Structure):
    """How a device hands over the rows of a call, and how it gets them back."""

    _fields_ = (
        ("call", ctypes.c_uint64),
        ("_after_call", ctypes.c_uint64 * 7),
        ("given", ctypes.c_uint32),
        ("_after_given", ctypes.c_uint32 * 15),
        ("done", ctypes.c_uint32),
        ("_after_done", ctypes.c_uint32 * 15),
    )


class Swap(ctypes.Structure):
    """Two experts that change places."""

    _fields_ = (
        ("place_of", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("leaves", "comes", "place")),
    )


class HostMatrix:
    """The rows of experts in host memory, `rows` of each place. Filled like a matrix of the device: rows are packed
    there and copied."""

    def __init__(
        self,
        make: MakeMatrix,
        rows: int,
        num_places: int,
        inputs: int,
        device: torch.device,
        allocate: Allocate,
        order: Tensor | None = None,
    ) -> None:
        """`order`: on the device, for which input each column takes (`OrderedMatrix`); None: they are in order."""
        self.device = device
        self.inputs = inputs
        self.rows = rows
        self.outputs = rows * num_places
        self.make = make
        self._kind = make(self.outputs, torch.device("meta"))
        self.keeps = self._kind.keeps if order is None else "ordered"
        self.order = order
        self.tensors = tuple(
            allocate(part.nbytes).view(part.dtype).view(part.shape)
            if part.numel()
            else torch.empty_like(part, device="cpu")
            for part in self._kind.tensors
        )
        self.num_bytes = sum(part.nbytes for part in self.tensors)
        self.kind = (
            rows,
            inputs,
            *((part.dtype, part.shape[1:]) for part in self.tensors),
            getattr(getattr(self._kind, "codes", None), "layout", None),
        )
        """Equal for matrices whose places have the same form."""
        self._table: bytes | None = None

    def put_order(self, first_row: int, columns: Tensor) -> None:  # noqa: ARG002
        """See `OrderedMatrix.put_order`."""
        assert self.order is not None
        self.order.copy_(columns.to(self.order.dtype))

    def put_values(self, first_row: int, values: Tensor) -> None:
        self._put(first_row, len(values), lambda matrix: matrix.put_values(0, values))

    def put_codes(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        self._put(first_row, len(code), lambda matrix: matrix.put_codes(0, code, scale, minimum))

    def put_float8(self, first_row: int, codes: Tensor, scales: Tensor) -> None:
        self._put(first_row, len(codes), lambda matrix: matrix.put_float8(0, codes, scales))

    def _put(self, first_row: int, count: int, put: Callable[[ExpertMatrix], None]) -> None:
        packed = self.make(count, self.device)
        put(packed)
        for own, part in zip(self.tensors, packed.tensors, strict=True):
            first = first_row * len(own) // self.outputs
            own[first : first + len(part)].copy_(part, non_blocking=True)

    def places(self, first: int, count: int) -> list[Tensor]:
        """The memory of some places, in each tensor."""
        return [self._part(part, first, count) for part in self.tensors]

    def _part(self, part: Tensor, first: int, count: int) -> Tensor:
        each = len(part) * self.rows // self.outputs
        return part[first * each : (first + count) * each]

    def store(self) -> Store:
        """As C sees it."""
        low, high, scales = (self.tensors[0], self.tensors[0], self.tensors[-1])
        made = Store(rows=self.rows, columns=self.inputs, low=low.data_ptr(), scales=scales.data_ptr())
        if isinstance(self._kind, DenseMatrix):
            made.form = _BFLOAT16 if low.dtype == torch.bfloat16 else _FLOAT32
        elif isinstance(self._kind, Float8Matrix):
            made.form, made.block = _FLOAT8, self._kind.codes.layout.block
        else:
            assert isinstance(self._kind, PackedMatrix)
            layout, high = self._kind.codes.layout, self.tensors[1]
            made.form, made.high = _PACKED, high.data_ptr() if high.numel() else low.data_ptr()
            made.low_bits, made.high_bits, made.group = layout.low_bits, layout.high_bits, layout.group
            made.zero = layout.zero_option
            if layout.codebook:
                self._table = bytes((layout.zero or 0) + value for value in layout.codebook)
                made.table = ctypes.cast(ctypes.c_char_p(self._table), ctypes.c_void_p).value
        return made


class _DeviceAddress:
    """Memory by its address, for `torch.as_tensor`."""

    def __init__(self, memory: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def mapped_on(device: torch.device, memory: Tensor) -> Tensor | None:
    """Page-locked memory, [bytes] uint8, as a tensor of the GPU, which reads and writes it over the bus. None where
    the device knows it under another address, or not at all."""
    try:
        mapped = torch.as_tensor(_DeviceAddress(memory), device=device)
        if mapped.data_ptr() != memory.data_ptr():
            return None
        for value in (85, 170):  # both directions
            mapped.fill_(value)
            torch.cuda.synchronize(device)
            if not bool((memory == value).all()):
                return None
            memory.fill_(255 - value)
            if int(mapped.max()) != 255 - value:
                return None
    except (RuntimeError, TypeError, ValueError):
        return None
    return mapped


def launch_host_function(stream: torch.cuda.Stream, function: Any, data: ctypes.Structure) -> None:
    """Has the driver call function(data) in the order of the stream. Both must live for as long as the stream's work,
    or the graph that captures it."""
    address = ctypes.cast(function, ctypes.c_void_p)
    error = _driver().cuLaunchHostFunc(
        ctypes.c_void_p(stream.cuda_stream), address, ctypes.c_void_p(ctypes.addressof(data))
    )
    if error:
        raise RuntimeError(f"the CUDA driver takes no function of the host (error {error})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def processors_of_one_node(number: int = 0, count: int = 1, root: Path = Path("/")) -> list[int]:
    """Processors of one memory node, of those that this process may use, for rank `number` of `count` that compute at
    the same time. Ranks take nodes in turns, the largest first, and share the processors of one. At least one
    processor. `root` is for tests."""
    own = os.sched_getaffinity(0)
    nodes = []
    for path in sorted(root.glob("sys/devices/system/node/node[0-9]*/cpulist")):
        with contextlib.suppress(OSError, ValueError):
            nodes.append(sorted(own & _cpu_list(path.read_text())))
    nodes = sorted(filter(None, nodes), key=len, reverse=True) or [sorted(own)]
    node = nodes[number % len(nodes)]
    ranks = range(number % len(nodes), count, len(nodes))
    place, size = ranks.index(number), len(ranks)
    return node[len(node) * place // size : len(node) * (place + 1) // size] or [node[len(node) * place // size]]


def _cpu_list(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found
