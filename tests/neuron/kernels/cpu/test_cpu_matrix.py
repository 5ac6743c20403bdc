"""Quantised matrices of a CPU match their dequantised values in every format, and are used where they are faster."""

from collections.abc import Iterator

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from cortex.neuron.kernels.cpu import native
from cortex.neuron.kernels.cpu.layout import ROW_BLOCK, CpuLayout, cpu_layout
from cortex.neuron.kernels.cpu.native import NativeMatrix, multiplies_codes
from cortex.neuron.kernels.dense.matrix import dense_product
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.native.library import native_library_or_none
from cortex.neuron.kernels.norm import rms_norm_reference

CPU = torch.device("cpu")
FORMATS = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS")


needs_library = pytest.mark.skipif(native_library_or_none() is None, reason="nothing can be compiled on this host")


def layout_of(stored: str) -> CpuLayout:
    layout = cpu_layout(stored)
    assert layout is not None
    return layout


def filled(layout: CpuLayout, outputs: int, inputs: int) -> tuple[NativeMatrix, Tensor]:
    """A random matrix, filled in parts, and its weights."""
    generator = torch.Generator().manual_seed(layout.bits)
    code = torch.randint(0, 1 << layout.bits, (outputs, inputs), dtype=torch.uint8, generator=generator)
    if layout.codebook:
        code = torch.tensor(layout.codebook, dtype=torch.uint8)[code.int() % len(layout.codebook)]
    scale = (torch.rand(outputs, inputs // layout.group, generator=generator) + 0.1).bfloat16().float()
    scale /= 1 << layout.bits
    minimum = -scale * (layout.zero or torch.randint(0, 1 << layout.bits, scale.shape, generator=generator))
    minimum = minimum.half().float()  # as in files
    if layout.has_short_scales:  # multiples of units, as in files
        units = torch.rand(2, outputs, 1, generator=generator).add(0.1).half().float()
        scale, minimum = (
            units * torch.randint(0, 16, (2, *scale.shape), generator=generator) * torch.tensor([[[1]], [[-1]]])
        )
    matrix = NativeMatrix(layout, outputs, inputs, CPU)
    for part in (slice(0, ROW_BLOCK), slice(ROW_BLOCK, outputs)):
        matrix.put_codes(part.start, code[part], scale[part], minimum[part])
    weights = (code.view(outputs, -1, layout.group) * scale[..., None] + minimum[..., None]).flatten(1)
    return matrix, weights


@needs_library
@pytest.mark.parametrize(("rows", "inputs"), [(1, 96), (3, 96), (40, 96), (2, 32)])
@pytest.mark.parametrize("stored", FORMATS)
def test_product_matches_the_dequantised_product(stored: str, rows: int, inputs: int) -> None:
    layout = layout_of(stored)
    matrix, weights = filled(layout, 3 * ROW_BLOCK - 5, inputs)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    tolerance = 3e-4  # inputs of sixteen bits
    expected = x @ weights.T
    y = matrix.product(x)
    assert (y.shape, y.dtype) == (expected.shape, x.dtype)
    assert (y - expected).norm() / expected.norm() < tolerance
    norm, bias, residual = torch.rand(inputs), torch.randn(len(weights)), torch.randn_like(y)
    expected = rms_norm_reference(x, norm, 1e-6) @ weights.T + bias + residual
    y = matrix.product(x, Prologue(norm, 1e-6), Epilogue(bias, residual))
    assert (y - expected).norm() / expected.norm() < tolerance


@needs_library
@pytest.mark.parametrize("stored", FORMATS)
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(stored: str) -> None:
    """Draft tokens are right if and only if they are the tokens of steps without drafts."""
    matrix, _ = filled(layout_of(stored), ROW_BLOCK + 5, 96)
    x = torch.randn(17, 96, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([matrix.product(row[None]) for row in x])
    for rows in range(len(x) + 1):
        assert torch.equal(matrix.product(x[:rows]), expected[:rows])


@needs_library
@pytest.mark.parametrize("inputs", [32, 96])
@pytest.mark.parametrize("stored", FORMATS)
def test_looked_up_rows_are_the_dequantised_ones(stored: str, inputs: int) -> None:
    layout = layout_of(stored)
    matrix, weights = filled(layout, 3 * ROW_BLOCK - 5, inputs)
    ids = torch.tensor([5, 3 * ROW_BLOCK - 6, 5, 0, 64, 63])
    assert torch.allclose(matrix.rows(ids, torch.float32), weights[ids], rtol=0, atol=0.01 * float(weights.abs().max()))


@pytest.mark.parametrize("outputs", [ROW_BLOCK, 3 * ROW_BLOCK - 5])
@pytest.mark.parametrize("stored", FORMATS)
def test_computed_bytes_are_the_allocated_ones(stored: str, outputs: int) -> None:
    layout = layout_of(stored)
    matrix = NativeMatrix(layout, outputs, 256, torch.device("meta"))
    assert matrix.num_bytes == layout.num_bytes(outputs, 256)


@pytest.mark.parametrize("stored", FORMATS)
def test_every_format_takes_little_more_than_the_file(stored: str) -> None:
    layout = layout_of(stored)
    assert layout.num_bytes(576, 1536) <= 1.3 * file_bytes(stored, 576, 1536)


def file_bytes(stored: str, outputs: int, inputs: int) -> int:
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored]]
    return outputs * inputs // block_elements * block_bytes


@pytest.fixture
def fresh_measurement() -> Iterator[None]:
    multiplies_codes.cache_clear()
    yield
    multiplies_codes.cache_clear()


@pytest.mark.usefixtures("fresh_measurement")
def test_form_is_measured_once_and_the_thread_count_is_restored() -> None:
    threads = torch.get_num_threads()
    is_faster = multiplies_codes(torch.float32)
    assert not is_faster or native_library_or_none() is not None
    assert multiplies_codes(torch.float32) is is_faster
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("fresh_measurement")
def test_codes_are_not_used_where_dense_products_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "shortest_times_s", lambda *_: [1.0, 2.0])
    assert not multiplies_codes(torch.float32)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_product_warns_of_nothing_on_any_processor(dtype: torch.dtype) -> None:
    x, weight = torch.ones(20, 64, dtype=dtype), torch.ones(128, 64, dtype=dtype)
    assert dense_product(x, weight).eq(64).all()
