"""Which of the forms of quantised matrices a CPU is fast at. A matrix exists once: for single rows, prompts, look-ups.

A decode step is bound by the bytes of the matrices. Products with codes need vector instructions that some processors
lack, and are far slower than dense ones there. Therefore `best_form` measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Final

import torch
from torch import Tensor

from cortex.neuron.kernels.cpu.dynamic import DynamicMatrix
from cortex.neuron.kernels.cpu.layout import GROUP, ROW_BLOCK, CpuForm, CpuLayout
from cortex.neuron.kernels.cpu.matrix import CpuMatrix
from cortex.neuron.kernels.cpu.native import NativeMatrix
from cortex.neuron.kernels.dense.matrix import dense_product

_TRIES = 4
_TOLERANCE = 0.03
"""Relative to the norm of the exact result: what quantised inputs may add."""


FORMS: Final[Mapping[CpuForm, type[CpuMatrix]]] = {
    CpuForm.NATIVE: NativeMatrix,
    CpuForm.DYNAMIC: DynamicMatrix,
}
"""In the order of preference."""


@cache
def best_form(dtype: torch.dtype) -> CpuForm | None:
    """The form of quantised matrices on this machine: our own, which is the smallest and most accurate, or the
    library's. None if a dense GEMV in `dtype` is faster than both.

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
    ids = torch.tensor([0, outputs - 1])
    candidates: dict[CpuForm, CpuMatrix] = {}
    with torch.inference_mode(), _one_thread():
        expected = dense_product(x, exact).float()
        for form, kind in FORMS.items():
            matrix = kind(CpuLayout(form, 4, GROUP, 8), outputs, inputs, torch.device("cpu"))
            try:
                for first in (0, outputs // 2):  # in two parts, like a matrix of several tensors
                    part = slice(first, first + outputs // 2)
                    matrix.put_codes(first, code[part], scale[part], -8 * scale[part])
                is_right = (matrix.product(x).float() - expected).norm() < _TOLERANCE * expected.norm()
                rows = matrix.rows(ids, torch.float32)
                if is_right and torch.allclose(rows, exact[ids].float(), rtol=0.01, atol=0.001):
                    candidates[form] = matrix
            except (RuntimeError, AttributeError, NotImplementedError):
                continue  # not in this build of torch, or not for this processor
        products = [partial(matrix.product, x) for matrix in candidates.values()]
        dense_s, *packed_s = shortest_times_s(partial(dense_product, x, exact), *products)
    times = {form: time_s for form, time_s in zip(candidates, packed_s, strict=True) if time_s < dense_s}
    return next((form for form in FORMS if form in times), None)


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
