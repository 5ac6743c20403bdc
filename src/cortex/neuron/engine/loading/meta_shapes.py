"""What some operations of torch return on the `meta` device: memory of a shape, and nothing in it.

Torch's own rules for these are Python functions whose first call imports its compiler, which takes longer than
compiling a kernel. Operations that are not here follow torch's rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _empty(shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _product(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _empty((*left.shape[:-1], right.shape[-1]), dtype or left.dtype)


def _pointwise(first: Any, second: Any = None, **_: Any) -> Tensor:
    tensors = [each for each in (first, second) if isinstance(each, Tensor)]
    shape = np.broadcast_shapes(*(tuple(each.shape) for each in tensors))
    return _empty(shape, tensors[0].dtype if second is None else torch.result_type(first, second))


def _real(first: Any, second: Any = None, **_: Any) -> Tensor:
    """A pointwise operation that makes floating-point values of integers."""
    made = _pointwise(first, second)
    return made if made.dtype.is_floating_point else _empty(made.shape, torch.get_default_dtype())


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _empty(shape, functools.reduce(torch.promote_types, (part.dtype for part in parts)))


def _range(*bounds: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    is_real = any(isinstance(bound, float) for bound in bounds)
    return _empty((math.ceil((end - start) / step),), dtype or (torch.get_default_dtype() if is_real else torch.int64))


def _unchanged(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _result(*_: Any, out: Tensor, **__: Any) -> Tensor:
    return out


def _new(shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _empty(shape, dtype)


RULES: Mapping[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("mm", "bmm"), _product),
    **dict.fromkeys(("mm.out", "bmm.out", "addmm.out"), _result),
    **dict.fromkeys(("addmm_", "index_copy_", "add_.Tensor", "mul_.Tensor", "div_.Tensor", "tanh_"), _unchanged),
    **dict.fromkeys(("add.Tensor", "mul.Tensor", "sub.Tensor", "neg"), _pointwise),
    **dict.fromkeys(("div.Tensor", "cos", "sin", "pow.Scalar", "sigmoid"), _real),
    **dict.fromkeys(("arange", "arange.start_step"), _range),
    **dict.fromkeys(("zeros", "ones"), _new),
    "cat": _joined,
    "addmm": lambda _, left, right, **__: _product(left, right),
    "_scaled_mm": lambda left, right, *_, out_dtype=None, **__: _product(left, right, out_dtype),
    "index_select": lambda x, dim, index: _empty((*x.shape[:dim], len(index), *x.shape[dim + 1 :]), x.dtype),
    "embedding": lambda weight, ids, *_, **__: _empty((*ids.shape, weight.shape[1]), weight.dtype),
}


class LightShapes(TorchDispatchMode):
    """Within it, operations of this thread follow these rules on the `meta` device; those of other threads do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what keeps the compiler out of it would import the compiler

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        rule = rules_by_operation().get(func)
        if rule is not None and _is_on_meta(args, kwargs):
            return rule(*args, **kwargs)
        if not _is_composite(func):
            return func(*args, **kwargs)
        with self:  # its parts follow the rules too
            return func._op_dk(_COMPOSITE, *args, **kwargs)


@functools.cache
def rules_by_operation() -> Mapping[OpOverload, Callable[..., Tensor]]:
    """`RULES` by operation."""
    found = {}
    for name, rule in RULES.items():
        packet, _, overload = name.partition(".")
        found[getattr(getattr(torch.ops.aten, packet), overload or "default")] = rule
    return found


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Whether an operation consists of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def _is_on_meta(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation makes a tensor there."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "meta"
    given = (each for arg in (*args, *kwargs.values()) for each in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return any(isinstance(each, Tensor) and each.is_meta for each in given)
