"""Makes Triton's interpreter fast enough for a test suite.

Tensors are small here, and most of its time goes into describing them: every operation decides again which types its
operands have in common, and makes types, shapes and constants again. They are kept here. Reductions other than those
that numpy has would take one element at a time, so a sort would take most of the time of its test.
"""

# ruff: noqa: SLF001

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_core: Any = core
_BlockType: Any = core.block_type
_Tensor: Any = core.tensor
_Semantic: Any = TritonSemantic
_interpreter: Any = interpreter

_init_block_type = _BlockType.__init__
_init_tensor = _Tensor.__init__
_find_common_type = _Semantic.binary_op_type_checking_impl
_broadcast = _Semantic.broadcast_impl_value
_cast = _Semantic.cast
_expand_dims = _Semantic.expand_dims
_to_tensor = _Semantic.to_tensor
_binary_op = _interpreter.InterpreterBuilder.binary_op
_element_type = _interpreter.TensorHandle.get_element_ty
_unwrap_if_constexpr = _core._unwrap_if_constexpr
_patch_attr = _interpreter._patch_attr
_numpy_dtype = _interpreter._get_np_dtype
_convert_float = _interpreter._convert_float

_NEVER_WRAP = frozenset((_Tensor, core.dtype, core.pointer_type, _BlockType, int, bool, float, str, type(None)))

_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[str, tuple[Any, Any]] = {}
_numpy_dtypes: dict[str, Any] = {}
_common_types: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_same_shapes: dict[tuple[str, str], Any] = {}
_expanded: dict[tuple[str, int], Any] = {}
_constants: dict[tuple[type, str], Any] = {}
_element_types: dict[str, Any] = {}
_largest_bytes: dict[str, int] = {}
_conversions: dict[tuple[Any, ...], Any] = {}
_widths: dict[str, int] = {}
_recordings: list[list[Any]] = []
"""What has happened so far in each operation that is recorded, the innermost last."""
_RECORDED = (
    *("add", "sub", "mul", "truediv", "and_", "or_"),
    *("equal", "not_equal", "less_than", "less_equal", "greater_than", "greater_equal"),
)
_NEW_AXIS = [(slice(None),) * axis + (None,) for axis in range(8)]


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


def _init_handle_unchecked(handle: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr


def _known_numpy_dtype(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _numpy_dtype(dtype)
    return _numpy_dtypes[name]


def _known_same_shape(block_type: Any, element_type: Any) -> Any:
    key = block_type.name, element_type.name
    if key not in _same_shapes:
        _same_shapes[key] = _BlockType(element_type, block_type.shape)
    return _same_shapes[key]


def _recorded(compute: Any) -> Any:
    """An operation of two operands, which for every pair of types remembers what they become, what is computed from
    both, and of which type the result is. What else it may be given is about overflow, which is not checked."""
    known: dict[tuple[str, str], Any] = {}

    def apply(semantic: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
        key = _key(left), _key(right)
        if (found := known.get(key)) is None:
            _recordings.append([])
            result = compute(semantic, left, right, *args, **kwargs)
            known[key] = _single_step(left, right, result, _recordings.pop())
        elif found:
            left_example, right_example, operation, result_type = found
            if left_example is not None:
                left = _converted(semantic, left, left_example)
            if right_example is not None:
                right = _converted(semantic, right, right_example)
            result = _Tensor(operation(semantic.builder, left.handle, right.handle), result_type)
        else:
            result = compute(semantic, left, right, *args, **kwargs)
        if _recordings:
            _recordings[-1].append(None)
        return result

    return apply


def _key(operand: Any) -> str:
    name: str = operand.type.name if type(operand) is _Tensor else repr(operand)
    return name


def _single_step(left: Any, right: Any, result: Any, recording: list[Any]) -> tuple[Any, ...]:
    """How the result is computed, if the operands only become of a common type and then are computed with once."""
    match recording:
        case [(_, found_left, found_right), (operation, left_handle, right_handle)] if (
            left_handle is found_left.handle and right_handle is found_right.handle
        ):
            return _example(left, found_left), _example(right, found_right), operation, result.type
    return ()


def _find_known_common_type(semantic: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    found = _known_common_type(semantic, left, right, *args, **kwargs)
    if _recordings:
        _recordings[-1].append((None, *found))
    return found


def _known_common_type(semantic: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The operands as the operation needs them. numpy broadcasts their data, so only their types are of one shape."""
    key = _key(left), _key(right), args, *kwargs.items()
    if (known := _common_types.get(key)) is None:
        found: tuple[Any, Any] = _find_common_type(semantic, left, right, *args, **kwargs)
        _common_types[key] = _example(left, found[0]), _example(right, found[1])
        return found
    left_example, right_example = known
    return (
        left if left_example is None else _converted(semantic, left, left_example),
        right if right_example is None else _converted(semantic, right, right_example),
    )


def _example(operand: Any, found: Any) -> Any:
    """What operands of this type become; None: they stay as they are."""
    return None if type(operand) is _Tensor and operand.type.name == found.type.name else found


def _converted(semantic: Any, operand: Any, example: Any) -> Any:
    if type(operand) is not _Tensor:
        return example  # a number: it is in the key
    if operand.dtype.name != example.dtype.name:
        operand = _cast(semantic, operand, example.dtype)
    return operand if operand.type.name == example.type.name else _Tensor(operand.handle, example.type)


def _expand_known_dims(semantic: Any, operand: Any, axis: int) -> Any:
    key = operand.type.name, axis
    if known := _expanded.get(key):
        return _Tensor(semantic.builder.create_expand_dims(operand.handle, axis), known)
    result = _expand_dims(semantic, operand, axis)
    if operand.type.is_block():
        _expanded[key] = result.type
    return result


def _with_new_axis(builder: Any, handle: Any, axis: int) -> Any:
    return _interpreter.TensorHandle(handle.data[_NEW_AXIS[axis]], handle.dtype.scalar)


def _to_known_tensor(semantic: Any, value: Any, check_type: bool = True) -> Any:
    if type(value) is _Tensor:
        return value
    if type(value) not in (int, float, bool):
        return _to_tensor(semantic, value, check_type)
    key = type(value), repr(value)
    if key not in _constants:
        _constants[key] = _to_tensor(semantic, value, check_type)
    return _constants[key]


def _known_element_type(handle: Any) -> Any:
    name = handle.dtype.name
    if name not in _element_types:
        _element_types[name] = _element_type(handle)
    return _element_types[name]


def _binary_op_of_known_size(builder: Any, left: Any, right: Any, operation: Any) -> Any:
    if _recordings:
        _recordings[-1].append((partial(_binary_op_of_known_size, operation=operation), left, right))
    if left.data.dtype.kind == "b" and right.data.dtype.kind == "b":
        return _binary_op(builder, left, right, operation)
    dtype = left.dtype.scalar
    if (largest_bytes := _largest_bytes.get(dtype.name)) is None:
        largest_bytes = 8 if dtype.is_ptr() else max(dtype.primitive_bitwidth // 8, 1)
        _largest_bytes[dtype.name] = largest_bytes
    output = operation(left.data, right.data)
    if output.itemsize > largest_bytes:
        output = output.astype(_known_numpy_dtype(dtype))
    return _interpreter.TensorHandle(output, dtype)


def _add_to_pointers(builder: Any, pointers: Any, offsets: Any) -> Any:
    if _recordings:
        _recordings[-1].append((_add_to_pointers, pointers, offsets))
    name = pointers.dtype.name
    if (width := _widths.get(name)) is None:
        width = _widths[name] = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    distances = offsets.data.astype(np.uint64)
    return _interpreter.TensorHandle(pointers.data + (distances if width == 1 else width * distances), pointers.dtype)


def _convert_by_table(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """The bits of floats as those of another type: of up to 16 bits each value is converted once, and bfloat16 is the
    upper half of float32."""
    bits = source.primitive_bitwidth
    if bits == 32 and target.name == "bf16" and rounding is None:
        return np.asarray(data.view(np.uint32) >> 16, np.uint16)
    if bits > 16:
        return _convert_float(data, source, target, rounding)
    numbers = np.uint8 if bits == 8 else np.uint16
    key = source.name, target.name, rounding
    if (table := _conversions.get(key)) is None:
        every = np.arange(1 << bits, dtype=numbers)
        table = _conversions[key] = _convert_float(every, source, target, rounding)
    return np.asarray(table[data.view(numbers)])


def _cast_where_types_differ(semantic: Any, operand: Any, dtype: Any, fp_downcast_rounding: str | None = None) -> Any:
    if operand.dtype is dtype.scalar:
        return operand
    return _cast(semantic, operand, dtype, fp_downcast_rounding)


def _broadcast_where_shapes_differ(semantic: Any, left: Any, right: Any) -> Any:
    if left.type.is_block() and right.type.is_block() and left.type.shape.values == right.type.shape.values:
        return left, right
    return _broadcast(semantic, left, right)


def _unwrap(value: Any) -> Any:
    return value if type(value) in _NEVER_WRAP else _unwrap_if_constexpr(value)


def _give_semantic(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Make `_semantic` a default of a function of the language: no wrapper has to add it to each call."""
    function = getattr(member, "__wrapped__", member)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if "_semantic" in (function.__kwdefaults__ or ()):
        function.__kwdefaults__["_semantic"] = _interpreter.interpreter_semantic
        scope.set_attr(owner, name, function)
    elif "_semantic" in names:
        values = list(function.__defaults__)
        values[names.index("_semantic") - len(names)] = _interpreter.interpreter_semantic
        function.__defaults__ = tuple(values)
        scope.set_attr(owner, name, function)
    else:
        _patch_attr(owner, name, member, builder, scope)


def _reduce_by_slices(reduction: Any, operands: tuple[Any, ...]) -> list[Any]:
    """Combines whole slices, one after the other, in place of single elements."""
    arrays = [each.handle.data if reduction.axis is not None else each.handle.data.ravel() for each in operands]
    shape, axis = arrays[0].shape, reduction.axis or 0

    def slices(place: int) -> tuple[Any, ...]:
        return tuple(
            reduction.to_tensor(array.take(place, axis), operand.dtype)
            for array, operand in zip(arrays, operands, strict=True)
        )

    total = slices(0)
    for place in range(1, shape[axis]):
        combined = reduction.combine_fn.fn(*total, *slices(place))
        total = combined if isinstance(combined, tuple) else (combined,)
    kept = (*shape[:axis], *(1,) * reduction.keep_dims, *shape[axis + 1 :])
    return [
        reduction.to_tensor(each.handle.data.reshape(kept), operand.dtype)
        for each, operand in zip(total, operands, strict=True)
    ]


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


def speed_up() -> None:
    _BlockType.__init__ = _init_block_type_once
    _Tensor.__init__ = _init_tensor_of_known_shape
    _BlockType.with_element_ty = _known_same_shape
    _Semantic.binary_op_type_checking_impl = _find_known_common_type
    for name in _RECORDED:
        setattr(_Semantic, name, _recorded(getattr(_Semantic, name)))
    _Semantic.cast = _cast_where_types_differ
    _Semantic.broadcast_impl_value = _broadcast_where_shapes_differ
    _Semantic.expand_dims = _expand_known_dims
    _Semantic.to_tensor = _to_known_tensor
    _interpreter.InterpreterBuilder.binary_op = _binary_op_of_known_size
    _interpreter.InterpreterBuilder.create_addptr = _add_to_pointers
    _interpreter.InterpreterBuilder.create_expand_dims = _with_new_axis
    _interpreter.TensorHandle.get_element_ty = _known_element_type
    _interpreter.TensorHandle.__init__ = _init_handle_unchecked
    _core._unwrap_if_constexpr = _unwrap
    no_policy = _core._normalize_cache_policy(None, None, None)
    _core._normalize_cache_policy = lambda *_: no_policy  # there is no cache
    _interpreter._patch_attr = _give_semantic
    _interpreter._get_np_dtype = _known_numpy_dtype
    _interpreter._convert_float = _convert_by_table
    _interpreter.ReduceOps.generic_reduce = _reduce_by_slices

    # It would replace the functions of the language again at every launch and every call of a device function, and
    # assert at every sum and product of integers that it does not overflow, which tensors as small as these never do.
    replaced = _interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
    replaced.restore = lambda: None
    _interpreter._patch_lang = lambda function: replaced
    _interpreter.InterpretedFunction.__call__ = _call_device_function
    builder = _interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
