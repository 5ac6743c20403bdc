"""GEMVs whose programs share the columns of a row."""

from __future__ import annotations

import pytest
import torch
from tests.neuron.kernels.quantised.test_product import (
    DEVICE,
    KIND,
    LAYOUTS,
    layout_name,
    needs_kernels,
    random_matrix,
)

from cortex.neuron.kernels.jit import TRITON
from cortex.neuron.kernels.matrix import PLAIN, Epilogue
from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised import matrix as matrix_module
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.one_row import LongRowParts, has_long_rows, long_row_parts, long_row_product


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "outputs", "inputs"),
    [*((layout, 19, 1184) for layout in LAYOUTS), (layouts.Q4, 200, 2048), (layouts.Q4, 3, 160)],
    ids=lambda each: layout_name(each) if isinstance(each, Layout) else str(each),
)
def test_shared_columns_agree_with_the_dequantised_matrix(layout: Layout, outputs: int, inputs: int) -> None:
    matrix = random_matrix(layout, outputs, inputs)
    x = torch.randn(1, inputs, device=DEVICE).to(KIND)
    bias = torch.randn(outputs, device=DEVICE).to(KIND)
    residual = torch.randn(1, outputs, device=DEVICE).to(KIND)
    first, second = (torch.full((1, outputs), torch.nan, dtype=KIND, device=DEVICE) for _ in range(2))
    for out in (first, second):
        long_row_product(x, matrix.codes, out, Epilogue(bias, residual))
    expected = x.float() @ matrix.values().t() + bias.float() + residual.float()
    torch.testing.assert_close(first.float(), expected, rtol=0.01, atol=2e-3 * inputs**0.5)
    assert torch.equal(first, second)  # the counters are 0 again, and the parts are added in a fixed order


@needs_kernels
def test_a_row_through_a_matrix_of_long_rows_shares_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(x: torch.Tensor, *rest: object) -> None:
        calls.append(len(x))
        long_row_product(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(matrix_module, "long_row_product", counted)
    matrix = random_matrix(layouts.Q4, 9, 4224)
    x = torch.randn(1, 4224, device=DEVICE).to(KIND)
    out = matrix.product(x, PLAIN, Epilogue())
    torch.testing.assert_close(out.float(), x.float() @ matrix.values().t(), rtol=0.01, atol=2e-3 * 4224**0.5)
    assert calls == [1]


@pytest.mark.skipif(not TRITON, reason="cut for Triton")
@pytest.mark.parametrize(
    ("chunks", "outputs", "processors", "expected"),
    [
        (96, 4096, 132, LongRowParts(12, 132)),
        (112, 4096, 132, LongRowParts(14, 113)),
        (256, 5120, 132, LongRowParts(32, 49)),
        (76, 2560, 132, LongRowParts(10, 158)),
        (96, 64, 132, LongRowParts(12, 8)),  # blocks of eight rows
        (4096, 4096, 28, LongRowParts(512, 1)),
    ],
)
def test_as_many_programs_as_run_at_once(chunks: int, outputs: int, processors: int, expected: LongRowParts) -> None:
    assert long_row_parts(chunks, outputs // 8, processors) == expected


@pytest.mark.parametrize(
    ("layout", "chunks", "outputs", "processors", "is_long"),
    [
        (layouts.Q4, 40, 4096, 132, True),
        (layouts.IQ4, 96, 4096, 132, True),
        (layouts.Q4, 32, 4096, 132, False),
        (layouts.Q8, 96, 4096, 132, True),
        (layouts.Q2, 96, 4096, 132, False),
        (layouts.Q6, 40, 152064, 132, True),
        (layouts.Q6, 40, 152064, 24, False),  # a head on a small card
    ],
)
def test_long_rows_are_those_that_were_faster(
    layout: Layout, chunks: int, outputs: int, processors: int, is_long: bool
) -> None:
    assert has_long_rows(layout, chunks, outputs, processors) == is_long
