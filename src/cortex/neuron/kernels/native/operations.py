"""Operations in C (`operations.h`): run at once, or recorded as a list that one call runs.

A recording is for a CPU what a CUDA graph is for a GPU: the operations of a step of the model, over fixed memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cortex.neuron.kernels.native.library import NativeMemory, native_library

_Addresses = ctypes.Array[ctypes.c_void_p]
_WITHOUT_WORK = frozenset(("__get__", "__len__", "dim", "data_ptr", "stride", "empty"))
_VIEWS = frozenset(
    ["view", "flatten", "contiguous", "split_with_sizes", "unbind", "__getitem__", "to", "float", "long"]
)
"""No work either, as long as the result has the memory of the input."""
_REPEATED = frozenset(("index_select", "add", "to", "float", "mul", "sigmoid"))
"""They compute the same shapes from any values, so that a recording may compute them again."""
_REPEATED_IN_PLACE = frozenset(("index_copy_",))
_KNOWN = _WITHOUT_WORK | _VIEWS | _REPEATED | _REPEATED_IN_PLACE


class NotRecorded(Exception):
    """A step has an operation that recordings do not know."""


class Operation(ctypes.Structure):
    """An operation in C, with what it points to."""

    _fields_: ClassVar[Sequence[Any]] = (("kind", ctypes.c_int32),)
    kept: object


class Product(Operation):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("activation", "is_half", "is_norm_half", "is_bias_half")),
        ("eps", ctypes.c_float),
        ("matrix", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("x", "norm", "bias", "residual", "out")),
        ("stride", ctypes.c_int64),
    )


class DecodeAttention(Operation):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("is_half", "is_norm_half")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_norm", "k_norm", "key_pages", "value_pages", "out")),
        *((name, ctypes.c_void_p) for name in ("sinks", "rope", "positions", "rope_positions", "slots")),
        *((name, ctypes.c_void_p) for name in ("table_rows", "page_table")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "rotated_dims", "pair_distance")),
        *((name, ctypes.c_int64) for name in ("page_tokens", "table_columns", "window")),
        *((name, ctypes.c_int64) for name in ("q_stride", "q_head_stride", "k_stride", "v_stride")),
    )


class Lookup(Operation):
    _fields_ = (
        ("is_half", ctypes.c_int32),
        ("matrix", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class Argmax(Operation):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "tokens", "is_finite")),
        ("count", ctypes.c_int64),
    )


_KINDS = (Product, DecodeAttention, Lookup, Argmax)


def operation(kind: type[Operation], **values: Any) -> Operation:
    """By field; tensors and matrices become their addresses, and are kept for as long as the operation."""
    fields = {name: _address(value) for name, value in values.items()}
    made = kind(kind=_KINDS.index(kind), **fields)
    made.kept = values
    return made


def _address(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.addressof(value) if isinstance(value, NativeMemory) else value


class _Current(threading.local):
    """The recording under way on this thread."""

    recording: Recording | None = None


_current = _Current()


def compute(made: Operation, rows: int, *, is_small: bool) -> None:
    """Runs an operation, or adds it to the recording under way. `is_small`: on one thread.

    Raises MemoryError or IndexError.
    """
    if _current.recording is not None:
        _current.recording.add(made)
        return
    native_library().run(_addresses([made]), rows, 1 if is_small else torch.get_num_threads())


def _addresses(operations: Sequence[Operation]) -> _Addresses:
    return (ctypes.c_void_p * len(operations))(*map(ctypes.addressof, operations))


def _memory(values: Any) -> set[int]:
    """Where the tensors among `values` have their memory."""
    tensors = (values,) if isinstance(values, Tensor) else values
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, Tensor)}


class Recording(TorchFunctionMode):
    """While it is entered, operations in C are recorded and not run. Those of torch run, so that there are tensors of
    the right shapes, and are recorded too. Raises NotRecorded where it does not know an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[list[Operation] | Callable[[], object]] = []
        """Consecutive operations in C are one list."""

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        _current.recording = self
        return self

    def __exit__(self, *raised: object) -> None:
        _current.recording = None
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def add(self, made: Operation) -> None:
        if not self._recorded or callable(self._recorded[-1]):
            self._recorded.append([])
        last = self._recorded[-1]
        assert isinstance(last, list)
        last.append(made)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        compute, name = partial(func, *args, **(kwargs or {})), func.__name__
        if name not in _KNOWN:  # not run either: its inputs may have no values yet
            raise NotRecorded(f"{name} is not known to recordings")
        out = compute()
        if name in _WITHOUT_WORK or (name in _VIEWS and _memory(out) <= _memory(args)):
            return out
        if name in _REPEATED:
            self._recorded.append(lambda: out.copy_(compute()))
        elif name in _REPEATED_IN_PLACE:
            self._recorded.append(compute)
        else:
            raise NotRecorded(f"{name} copies, which is not known to recordings")
        return out

    def replay(self, rows: int) -> None:
        """Runs the operations again, those in C on the first `rows` rows. Raises MemoryError or IndexError."""
        library, num_threads = native_library(), torch.get_num_threads()
        for part in self._parts:
            if callable(part):
                part()
            else:
                library.run(part, rows, num_threads)

    @cached_property
    def _parts(self) -> list[_Addresses | Callable[[], object]]:
        return [part if callable(part) else _addresses(part) for part in self._recorded]
