"""Quantised matrices in a CPU's memory. Each exists once: for single rows, for prompts and for look-ups.

A decode step is bound by the bytes of the matrices. torch implements each product with vector instructions for some
processors only, and is far slower than a dense product on the others. Therefore `best_form` measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.products.cpu_layout import GROUP, ROW_BLOCK, CpuForm, CpuLayout
from cortex.neuron.kernels.products.dynamic import DynamicMatrix
from cortex.neuron.kernels.products.native import NativeMatrix
from cortex.neuron.kernels.products.weight_only import WeightOnlyMatrix

_TRIES = 4
_TOLERANCE = 0.03
"""Relative to the norm of the exact product: what quantised inputs may add."""


class CpuMatrix(Protocol):
    """[outputs, inputs] in a CPU's memory, allocated once and filled by `put`."""

    @property
    def layout(self) -> CpuLayout: ...

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What holds the weights."""
        ...

    @property
    def rounds_products(self) -> bool:
        """Whether products are rounded to half precision, even if the input is float32."""
        ...

    def put(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        """Fill rows from `first_row` on, whole blocks of rows up to the last row, with `scale · code + minimum`.

        code: [rows, inputs] uint8; scale and minimum: [rows, inputs / group] float32
        """
        ...

    def put_numbers(self, first_row: int, numbers: Tensor) -> None:
        """Quantise dense rows and fill rows from `first_row` on with them. numbers: [rows, inputs]"""
        ...

    def product(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """`scale` · x Wᵀ. x: [rows, inputs] → [rows, outputs], of the dtype of x"""
        ...

    def rows(self, numbers: Tensor) -> Tensor:
        """The rows of these numbers. numbers: [n] → [n, inputs] float32"""
        ...


def empty_cpu_matrix(layout: CpuLayout, outputs: int, inputs: int, device: torch.device) -> CpuMatrix:
    """Memory for a matrix, contents undefined until `put` has filled all rows."""
    if layout.form is CpuForm.NATIVE:
        return NativeMatrix.empty(layout, outputs, inputs, device)
    if layout.form is CpuForm.DYNAMIC:
        return DynamicMatrix.empty(layout, outputs, inputs, device)
    return WeightOnlyMatrix.empty(layout, outputs, inputs, device)


@cache
def best_form(dtype: torch.dtype) -> CpuForm | None:
    """The form of quantised matrices on this machine: our own, which is the smallest, or the fastest of the library's.
    None if a dense one-row product in `dtype` is faster than all of them.

    Takes tens of milliseconds, once per process, and seconds on a host that has not compiled our own before. The
    products run alternately on one thread. Their shortest processor times are compared, so that other load matters
    little. A form that is not possible here, or whose products are wrong, does not count.
    """
    outputs, inputs = 16 * ROW_BLOCK, 1024
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scale = torch.full((outputs, inputs // GROUP), 0.125)
    exact = ((code.float() - 8) * 0.125).to(dtype)
    x = torch.randn(1, inputs, generator=generator).to(dtype)
    numbers = torch.tensor([0, outputs - 1])
    candidates: dict[CpuForm, CpuMatrix] = {}
    with torch.inference_mode(), _one_thread():
        expected = dense_product(x, exact).float()
        for form in CpuForm:
            matrix = empty_cpu_matrix(CpuLayout(form, 4, GROUP, 8), outputs, inputs, torch.device("cpu"))
            try:
                for first in (0, outputs // 2):  # in two parts, like a matrix of several tensors
                    part = slice(first, first + outputs // 2)
                    matrix.put(first, code[part], scale[part], -8 * scale[part])
                is_right = (matrix.product(x).float() - expected).norm() < _TOLERANCE * expected.norm()
                if is_right and torch.allclose(matrix.rows(numbers), exact[numbers].float(), rtol=0.01, atol=0.001):
                    candidates[form] = matrix
            except (RuntimeError, AttributeError, NotImplementedError):
                continue  # not in this build of torch, or not for this processor
        products = [partial(matrix.product, x) for matrix in candidates.values()]
        dense_s, *packed_s = shortest_times_s(partial(dense_product, x, exact), *products)
    times = {form: time_s for form, time_s in zip(candidates, packed_s, strict=True) if time_s < dense_s}
    return CpuForm.NATIVE if CpuForm.NATIVE in times else min(times, key=times.__getitem__, default=None)


def dense_product(x: Tensor, weight: Tensor) -> Tensor:
    """x: [rows, in], weight: [out, in] → [rows, out]"""
    if len(x) == 1:
        return torch.mv(weight, x[0])[None]  # F.linear with one row repacks the matrix on every call
    if x.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with _without_onednn():  # else torch tries it, fails, and warns of that
            return F.linear(x, weight)
    return F.linear(x, weight)


def shortest_times_s(*candidates: Callable[[], Tensor]) -> list[float]:
    """The shortest processor time of each candidate, in seconds. The candidates run alternately."""
    best = [float("inf")] * len(candidates)
    for _ in range(_TRIES):
        for index, candidate in enumerate(candidates):
            start = time.thread_time()
            candidate()
            best[index] = min(best[index], time.thread_time() - start)
    return best


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
