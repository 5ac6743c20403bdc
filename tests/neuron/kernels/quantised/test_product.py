"""Packed matrices: what is packed comes back, and products agree with the dequantised matrix."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised import product
from cortex.neuron.kernels.quantised.few_rows import few_rows_product, gated_few_rows_product
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.one_row import gated_one_row_product, one_row_product
from cortex.neuron.kernels.quantised.packing import PackedMatrix, empty_matrix, unpacked
from cortex.neuron.kernels.quantised.product import (
    dequantise,
    gated_product,
    packed_product,
    packed_product_reference,
    packed_rows,
)
from cortex.neuron.kernels.quantised.tiles import PackedTiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU or TRITON_INTERPRET=1"
)
KIND = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter multiplies no bfloat16
LAYOUTS = [layouts.Q2, layouts.Q3, layouts.Q4, layouts.Q5, layouts.Q6, layouts.Q8, layouts.IQ4, layouts.FP4]


def layout_name(layout: Layout) -> str:
    return f"{layout.bits}bit" + (f"-levels-to-{max(layout.levels)}" if layout.levels else "")


class Codes(NamedTuple):
    code: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor


def random_codes(layout: Layout, rows: int, columns: int) -> Codes:
    groups = columns // layout.group
    code = torch.randint(0, 1 << layout.bits, (rows, columns), dtype=torch.uint8, device=DEVICE)
    largest = max(layout.levels, default=1 << layout.bits)
    scale = (torch.randn(rows, groups, device=DEVICE) / largest).bfloat16().float()
    if layout.levels:
        code = torch.tensor(layout.levels, device=DEVICE)[code.int()].add(layout.zero or 0).to(torch.uint8)
    minimum = (torch.randn(rows, groups, device=DEVICE)).bfloat16().float()
    if layout.zero is not None:
        minimum = -layout.zero * scale
    return Codes(code, scale, minimum)


def dense(codes: Codes, layout: Layout) -> torch.Tensor:
    grouped = codes.code.view(len(codes.code), -1, layout.group).float()
    return (grouped * codes.scale[..., None] + codes.minimum[..., None]).flatten(1)


def random_matrix(layout: Layout, outputs: int, inputs: int) -> PackedMatrix:
    matrix = empty_matrix(layout, outputs, inputs, DEVICE)
    matrix.put(0, *random_codes(layout, outputs, inputs))
    return matrix


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("inputs", [32, 128, 160, 384])
def test_unpacked_matrix_equals_codes_times_scales(layout: Layout, inputs: int) -> None:
    codes = random_codes(layout, 24, inputs)
    matrix = empty_matrix(layout, 24, inputs, DEVICE)
    matrix.put(0, *(part[:16] for part in codes))
    matrix.put(16, *(part[16:] for part in codes))
    torch.testing.assert_close(unpacked(matrix), dense(codes, layout), rtol=1e-6, atol=1e-6)
    rows = torch.tensor([5, 17, 5], device=DEVICE)
    torch.testing.assert_close(unpacked(matrix, rows), unpacked(matrix)[rows], rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_num_bytes_is_what_the_tensors_take(layout: Layout) -> None:
    matrix = empty_matrix(layout, 48, 160, DEVICE)
    assert layout.num_bytes(48, 160) == sum(tensor.numel() * tensor.element_size() for tensor in matrix.tensors)


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 160)])
def test_dequantised_rows_equal_the_reference(layout: Layout, outputs: int, inputs: int) -> None:
    matrix = random_matrix(layout, outputs, inputs)
    out = torch.full((outputs - 7, inputs), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    dequantise(matrix, 3, outputs - 7, out)
    torch.testing.assert_close(out, unpacked(matrix)[3:-4].bfloat16(), rtol=0.01, atol=1e-3)
    tokens = torch.randint(0, outputs, (19,), device=DEVICE)
    looked_up = packed_rows(matrix, tokens, torch.bfloat16)
    torch.testing.assert_close(looked_up, unpacked(matrix)[tokens].bfloat16(), rtol=0.01, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "rows", "outputs", "inputs"),
    [
        *((layout, 3, 72, 160) for layout in LAYOUTS),
        *((layouts.Q4, rows, 72, 160) for rows in (1, 17, 70)),
        *((layout, 9, 72, 160) for layout in (layouts.Q5, layouts.Q6, layouts.Q8)),
        (layouts.Q8, 8, 40, 1184),
        (layouts.Q4, 10, 130, 1024),
        (layouts.Q6, 70, 40, 160),
        (layouts.IQ4, 70, 40, 160),
    ],
)
def test_product_agrees_with_the_dequantised_matrix(layout: Layout, rows: int, outputs: int, inputs: int) -> None:
    matrix = random_matrix(layout, outputs, inputs)
    x = torch.randn(rows, inputs, device=DEVICE).to(KIND)
    bias = torch.randn(outputs, device=DEVICE).to(KIND)
    residual = torch.randn(rows, outputs, device=DEVICE).to(KIND)
    wide = torch.full((rows, outputs + 24), torch.nan, dtype=KIND, device=DEVICE)
    for _ in range(2 if inputs > 512 else 1):  # the second split product finds the counters as the first left them
        packed_product(x, matrix, wide[:, 8 : 8 + outputs], bias, residual)
        torch.testing.assert_close(
            wide[:, 8 : 8 + outputs].float(),
            packed_product_reference(x, matrix, bias, residual).float(),
            rtol=0.02,
            atol=0.02 * inputs**0.5,
        )
    assert wide[:, :8].isnan().all()
    assert wide[:, 8 + outputs :].isnan().all()
    assert not matrix.counters.any()


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "tiles"),
    [
        (layouts.Q4, PackedTiles(outputs=64, chunks=2, warps=4, stages=3, split=2, registers=255)),
        (layouts.Q8, PackedTiles(outputs=128, chunks=2, warps=8, stages=3, split=4, registers=128)),
    ],
    ids=["4bit", "8bit"],
)
def test_product_with_two_chunks_at_a_time(layout: Layout, tiles: PackedTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "small_batch_tiles", lambda *_: tiles)
    matrix, x = random_matrix(layout, 72, 992), torch.randn(9, 992, device=DEVICE).to(KIND)
    out = torch.full((9, 72), torch.nan, dtype=KIND, device=DEVICE)
    packed_product(x, matrix, out)
    expected = packed_product_reference(x, matrix, None, None)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02 * 1000**0.5)
    assert not matrix.counters.any()


@needs_kernels
@pytest.mark.parametrize("rows", [3, 70])
def test_product_adds_to_what_it_overwrites(rows: int) -> None:
    matrix = random_matrix(layouts.Q4, 40, 160)
    x, residual = (torch.randn(rows, size, device=DEVICE).to(KIND) for size in (160, 40))
    expected = packed_product_reference(x, matrix, None, residual)
    packed_product(x, matrix, residual, None, residual)
    torch.testing.assert_close(residual.float(), expected.float(), rtol=0.02, atol=0.02 * 160**0.5)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "outputs", "inputs"),
    [
        *((layout, 24, 160) for layout in LAYOUTS),
        (layouts.Q4, 21, 1024),
        (layouts.Q4, 8, 2560),
        (layouts.Q6, 4, 12288),
        (layouts.Q5, 9, 5120),
        (layouts.Q3, 9, 5120),
        (layouts.Q8, 4, 5120),
        (layouts.IQ4, 12, 5120),
    ],
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_one_row_agrees_with_the_dequantised_matrix(layout: Layout, outputs: int, inputs: int, has_norm: bool) -> None:
    matrix = random_matrix(layout, outputs, inputs)
    x = torch.randn(1, inputs, device=DEVICE).to(KIND)
    norm_weight = torch.rand(inputs, device=DEVICE).to(KIND) if has_norm else None
    bias = torch.randn(outputs, device=DEVICE).to(KIND)
    residual = torch.randn(1, outputs, device=DEVICE).to(KIND)
    out = torch.full((1, outputs), torch.nan, dtype=KIND, device=DEVICE)
    one_row_product(x, matrix, out, bias, norm_weight, 1e-6, residual)
    value = x.float()
    if norm_weight is not None:
        value = torch.nn.functional.rms_norm(value, (inputs,), norm_weight.float(), 1e-6)
    expected = value @ unpacked(matrix).t() + bias.float() + residual.float()
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=2e-3 * inputs**0.5)


@needs_kernels
@pytest.mark.parametrize("layout", [layouts.Q4, layouts.Q6, layouts.Q8, layouts.IQ4], ids=layout_name)
@pytest.mark.parametrize(("outputs", "inputs"), [(20, 160)])
def test_gated_row_agrees_with_the_dequantised_matrices(layout: Layout, outputs: int, inputs: int) -> None:
    matrix = random_matrix(layout, 2 * outputs, inputs)
    x = torch.randn(1, inputs, device=DEVICE).to(KIND)
    norm_weight = torch.rand(inputs, device=DEVICE).to(KIND)
    out = torch.full((1, outputs), torch.nan, dtype=KIND, device=DEVICE)
    gated_one_row_product(x, matrix, out, norm_weight, 1e-6)
    value = torch.nn.functional.rms_norm(x.float(), (inputs,), norm_weight.float(), 1e-6)
    gate, up = (value @ unpacked(matrix).t()).chunk(2, dim=-1)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=4e-3 * inputs)


@needs_kernels
@pytest.mark.parametrize(("layout", "inputs"), [(layouts.Q5, 160), (layouts.Q6, 160), (layouts.Q8, 1184)])
def test_normed_rows_agree_with_the_dequantised_matrix(layout: Layout, inputs: int) -> None:
    matrix = random_matrix(layout, 2 * 12, inputs)
    x = (torch.randn(5, inputs, device=DEVICE) * torch.arange(1, 6, device=DEVICE)[:, None]).to(KIND)
    norm_weight = torch.rand(inputs, device=DEVICE).to(KIND)
    residual = torch.randn(5, 24, device=DEVICE).to(KIND)
    expected = torch.nn.functional.rms_norm(x.float(), (inputs,), norm_weight.float(), 1e-6) @ unpacked(matrix).t()
    out = torch.full((5, 24), torch.nan, dtype=KIND, device=DEVICE)
    few_rows_product(x, matrix, out, None, norm_weight, 1e-6, residual)
    torch.testing.assert_close(out.float(), expected + residual.float(), rtol=0.02, atol=4e-3 * inputs**0.5)
    gate, up = expected.chunk(2, dim=-1)
    out = gated_few_rows_product(x, matrix, norm_weight, 1e-6)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=4e-3 * inputs)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "tiles"),
    [(layouts.Q4, PackedTiles(64, 2, 4, 3, 2, 255)), (layouts.Q6, PackedTiles(128, 2, 8, 3, 1, 128))],
)
def test_gated_rows_agree_with_the_dequantised_matrices(
    layout: Layout, tiles: PackedTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "small_batch_tiles", lambda *_: tiles)
    outputs, inputs = tiles.outputs // 2 + 8, 512  # two programs, the second with outputs that do not exist
    matrix = random_matrix(layout, 2 * outputs, inputs)
    x = (torch.randn(9, inputs, device=DEVICE) * inputs**-0.5).to(KIND)
    gate, up = (x.float() @ unpacked(matrix).t()).chunk(2, dim=-1)
    out = gated_product(x, matrix)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=0.03)


@needs_kernels
def test_norm_of_another_dtype_is_applied_before_the_row() -> None:
    matrix = random_matrix(layouts.Q4, 24, 160)
    x = torch.randn(1, 160, device=DEVICE).to(KIND)
    norm_weight = torch.rand(160, device=DEVICE, dtype=torch.float64 if torch.float32 == KIND else torch.float32)
    out = torch.full((1, 24), torch.nan, dtype=KIND, device=DEVICE)
    one_row_product(x, matrix, out, None, norm_weight, 1e-6, None)
    value = torch.nn.functional.rms_norm(x.float(), (160,), norm_weight.float(), 1e-6)
    torch.testing.assert_close(out.float(), value @ unpacked(matrix).t(), rtol=0.02, atol=0.05)
