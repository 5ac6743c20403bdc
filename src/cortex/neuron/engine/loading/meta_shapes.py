"""Rules for the results of some torch operations on the `meta` device, which have shapes but no data.

Torch's own rules for these are Python functions whose first call imports its compiler, which takes longer than
compiling a kernel. Operations that are not here follow torch's rules.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cortex.neuron.private_api.torch import ShapeRule, with_shape_rules


def _empty(shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _product(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _empty((*left.shape[:-1], right.shape[-1]), dtype or left.dtype)


def _scaled_product(left: Tensor, right: Tensor, *others: Any, **_: Any) -> Tensor:
    return _product(left, right, next((each for each in others if isinstance(each, torch.dtype)), None))


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


RULES: Mapping[str, ShapeRule] = {
    **dict.fromkeys(("mm", "bmm"), _product),
    **dict.fromkeys(("mm.out", "bmm.out", "addmm.out"), _result),
    **dict.fromkeys(("addmm_", "index_copy_", "add_.Tensor", "mul_.Tensor", "div_.Tensor", "tanh_"), _unchanged),
    **dict.fromkeys(("add.Tensor", "mul.Tensor", "sub.Tensor", "neg"), _pointwise),
    **dict.fromkeys(("div.Tensor", "cos", "sin", "pow.Scalar", "sigmoid"), _real),
    **dict.fromkeys(("arange", "arange.start_step"), _range),
    **dict.fromkeys(("zeros", "ones"), _new),
    "cat": _joined,
    "addmm": lambda _, left, right, **__: _product(left, right),
    "_scaled_mm_v2": _scaled_product,
    "index_select": lambda x, dim, index: _empty((*x.shape[:dim], len(index), *x.shape[dim + 1 :]), x.dtype),
    "embedding": lambda weight, ids, *_, **__: _empty((*ids.shape, weight.shape[1]), weight.dtype),
}


def light_shapes() -> contextlib.AbstractContextManager[object]:
    """A context in which this thread's operations on the `meta` device follow these rules."""
    return with_shape_rules(RULES)
