"""Makes Triton's interpreter fast enough for a test suite.

Tensors are small here, and most of its time goes into describing them: every operation makes types, shapes and tables
of types again. They are kept here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from triton.language import core, standard
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_BlockType: Any = core.block_type
_Tensor: Any = core.tensor
_Semantic: Any = TritonSemantic
_interpreter: Any = interpreter

_init_block_type = _BlockType.__init__
_init_tensor = _Tensor.__init__
_broadcast = _Semantic.broadcast_impl_value
_numpy_dtype = _interpreter._get_np_dtype  # noqa: SLF001

_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[str, tuple[Any, Any]] = {}
_numpy_dtypes: dict[str, Any] = {}


def _init_block_type_once(block_type: Any, element_type: Any, shape: Any) -> None:
    key = (element_type.name, *[getattr(size, "value", size) for size in shape])
    if key not in _block_types:
        _init_block_type(block_type, element_type, shape)
        _block_types[key] = block_type.__dict__
    block_type.__dict__ = _block_types[key]


def _init_tensor_of_known_shape(tensor: Any, handle: Any, dtype: Any) -> None:
    if known := _shapes.get(dtype.name):
        tensor.handle, tensor.type, tensor.dtype = handle, dtype, dtype.scalar
        tensor.shape, tensor.numel = known
    else:
        _init_tensor(tensor, handle, dtype)
        _shapes[dtype.name] = tensor.shape, tensor.numel


def _known_numpy_dtype(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _numpy_dtype(dtype)
    return _numpy_dtypes[name]


def _broadcast_where_shapes_differ(semantic: Any, left: Any, right: Any) -> Any:
    if left.type.is_block() and right.type.is_block() and left.type.shape.values == right.type.shape.values:
        return left, right
    return _broadcast(semantic, left, right)


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


def speed_up() -> None:
    _BlockType.__init__ = _init_block_type_once
    _Tensor.__init__ = _init_tensor_of_known_shape
    _Semantic.broadcast_impl_value = _broadcast_where_shapes_differ
    _interpreter._get_np_dtype = _known_numpy_dtype  # noqa: SLF001

    # It would replace the functions of the language again at every call of a device function, and assert at every sum
    # and product of integers that it does not overflow, which tensors as small as these never do.
    _interpreter._patch_lang(standard.sum.fn)  # noqa: SLF001
    _interpreter.InterpretedFunction.__call__ = _call_device_function
    builder = _interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
