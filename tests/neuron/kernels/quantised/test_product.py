"""Packed matrices: what is packed comes back, and products agree with the dequantised matrix."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from cortex.neuron.kernels.activations import ACTIVATIONS, activate_reference
from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, Prologue
from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised import product
from cortex.neuron.kernels.quantised.codes import empty_codes, unpacked
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.matrix import PackedMatrix
from cortex.neuron.kernels.quantised.product import PackedTiles, dequantise, packed_product_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU or TRITON_INTERPRET=1"
)
KIND = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter multiplies no bfloat16
LAYOUTS = [
    layouts.Q2, layouts.Q3, layouts.Q4, layouts.Q5, layouts.Q6, layouts.Q8, layouts.IQ4, layouts.FP4, layouts.INT4,
    layouts.INT8,
]  # fmt: skip


def layout_name(layout: Layout) -> str:
    return (
        f"{layout.bits}bit"
        + "-zeros" * layout.has_zeros
        + (f"-codebook-to-{max(layout.codebook)}" if layout.codebook else "")
    )


class Codes(NamedTuple):
    code: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor


def random_codes(layout: Layout, rows: int, columns: int) -> Codes:
    groups = columns // layout.group
    code = torch.randint(0, 1 << layout.bits, (rows, columns), dtype=torch.uint8, device=DEVICE)
    largest = max(layout.codebook, default=1 << layout.bits)
    scale = (torch.randn(rows, groups, device=DEVICE) / largest).bfloat16().float()
    if layout.codebook:
        code = torch.tensor(layout.codebook, device=DEVICE)[code.int()].add(layout.zero or 0).to(torch.uint8)
    minimum = (torch.randn(rows, groups, device=DEVICE)).bfloat16().float()
    if layout.has_zeros:
        scale = (torch.rand(rows, groups, device=DEVICE) / largest).half().float()
        return Codes(code, scale, -torch.randint(0, 1 << layout.bits, (rows, groups), device=DEVICE) * scale)
    if layout.zero is not None:
        minimum = -layout.zero * scale
    return Codes(code, scale, minimum)


def dense(codes: Codes, layout: Layout) -> torch.Tensor:
    grouped = codes.code.view(len(codes.code), -1, layout.group).float()
    return (grouped * codes.scale[..., None] + codes.minimum[..., None]).flatten(1)


def random_matrix(layout: Layout, outputs: int, inputs: int) -> PackedMatrix:
    matrix = PackedMatrix(layout, outputs, inputs, DEVICE)
    matrix.put_codes(0, *random_codes(layout, outputs, inputs))
    return matrix


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("inputs", [32, 128, 160, 384])
def test_unpacked_matrix_equals_codes_times_scales(layout: Layout, inputs: int) -> None:
    codes = random_codes(layout, 24, inputs)
    matrix = empty_codes(layout, 24, inputs, DEVICE)
    matrix.put_codes(0, *(part[:16] for part in codes))
    matrix.put_codes(16, *(part[16:] for part in codes))
    torch.testing.assert_close(unpacked(matrix), dense(codes, layout), rtol=1e-6, atol=1e-6)
    rows = torch.tensor([5, 17, 5], device=DEVICE)
    torch.testing.assert_close(unpacked(matrix, rows), unpacked(matrix)[rows], rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_num_bytes_is_what_the_tensors_take(layout: Layout) -> None:
    assert layout.num_bytes(48, 160) == PackedMatrix(layout, 48, 160, DEVICE).num_bytes


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 160)])
def test_dequantised_rows_equal_the_reference(layout: Layout, outputs: int, inputs: int) -> None:
    matrix = random_matrix(layout, outputs, inputs)
    out = torch.full((outputs - 7, inputs), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    dequantise(matrix.codes, 3, outputs - 7, out)
    torch.testing.assert_close(out, matrix.values()[3:-4].bfloat16(), rtol=0.01, atol=1e-3)
    tokens = torch.randint(0, outputs, (19,), device=DEVICE)
    looked_up = matrix.rows(tokens, torch.bfloat16)
    torch.testing.assert_close(looked_up, matrix.values()[tokens].bfloat16(), rtol=0.01, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "rows", "outputs", "inputs"),
    [
        *((layout, 3, 72, 160) for layout in LAYOUTS),
        *((layouts.Q4, rows, 72, 160) for rows in (1, 17, 70)),
        *((layout, 9, 72, 160) for layout in (layouts.Q5, layouts.Q6, layouts.Q8, layouts.INT8)),
        (layouts.INT4, 70, 40, 160),
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
    epilogue = Epilogue(bias, residual)
    wide = torch.full((rows, outputs + 24), torch.nan, dtype=KIND, device=DEVICE)
    for _ in range(2 if inputs > 512 else 1):  # the second split product finds the counters as the first left them
        matrix.product(x, PLAIN, epilogue, wide[:, 8 : 8 + outputs])
        torch.testing.assert_close(
            wide[:, 8 : 8 + outputs].float(),
            packed_product_reference(x, matrix.codes, epilogue).float(),
            rtol=0.02,
            atol=0.02 * inputs**0.5,
        )
    assert wide[:, :8].isnan().all()
    assert wide[:, 8 + outputs :].isnan().all()
    assert not matrix.codes.counters.any()


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
    expected = packed_product_reference(x, matrix.codes)
    torch.testing.assert_close(matrix.product(x), expected, rtol=0.02, atol=0.02 * 1000**0.5)
    assert not matrix.codes.counters.any()


@needs_kernels
@pytest.mark.parametrize("rows", [3, 70])
def test_product_adds_to_what_it_overwrites(rows: int) -> None:
    matrix = random_matrix(layouts.Q4, 40, 160)
    x, residual = (torch.randn(rows, size, device=DEVICE).to(KIND) for size in (160, 40))
    expected = packed_product_reference(x, matrix.codes, Epilogue(residual=residual))
    matrix.product(x, PLAIN, Epilogue(residual=residual), residual)
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
    norm = torch.rand(inputs, device=DEVICE).to(KIND) if has_norm else None
    bias = torch.randn(outputs, device=DEVICE).to(KIND)
    residual = torch.randn(1, outputs, device=DEVICE).to(KIND)
    out = torch.full((1, outputs), torch.nan, dtype=KIND, device=DEVICE)
    matrix.product(x, Prologue(norm, 1e-6), Epilogue(bias, residual), out)
    value = x.float()
    if norm is not None:
        value = torch.nn.functional.rms_norm(value, (inputs,), norm.float(), 1e-6)
    expected = value @ matrix.values().t() + bias.float() + residual.float()
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=2e-3 * inputs**0.5)


def gated(activation: str = "silu") -> Epilogue:
    return Epilogue(activation=activation)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "activation"),
    [*((layout, "silu") for layout in (layouts.Q4, layouts.Q6, layouts.Q8, layouts.IQ4)), (layouts.Q4, "gelu_tanh")],
)
def test_gated_row_agrees_with_the_dequantised_matrices(layout: Layout, activation: str) -> None:
    matrix = random_matrix(layout, 40, 160)
    x = torch.randn(1, 160, device=DEVICE).to(KIND)
    norm = torch.rand(160, device=DEVICE).to(KIND)
    out = matrix.product(x, Prologue(norm, 1e-6), gated(activation))
    value = torch.nn.functional.rms_norm(x.float(), (160,), norm.float(), 1e-6)
    expected = activate_reference(value @ matrix.values().t(), activation)
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.64)


@needs_kernels
@pytest.mark.parametrize(("layout", "inputs"), [(layouts.Q5, 160), (layouts.Q6, 160), (layouts.Q8, 1184)])
def test_normed_rows_agree_with_the_dequantised_matrix(layout: Layout, inputs: int) -> None:
    matrix = random_matrix(layout, 2 * 12, inputs)
    x = (torch.randn(5, inputs, device=DEVICE) * torch.arange(1, 6, device=DEVICE)[:, None]).to(KIND)
    norm = Prologue(torch.rand(inputs, device=DEVICE).to(KIND), 1e-6)
    residual = torch.randn(5, 24, device=DEVICE).to(KIND)
    assert norm.norm is not None
    expected = torch.nn.functional.rms_norm(x.float(), (inputs,), norm.norm.float(), 1e-6) @ matrix.values().t()
    out = matrix.product(x, norm, Epilogue(residual=residual))
    torch.testing.assert_close(out.float(), expected + residual.float(), rtol=0.02, atol=4e-3 * inputs**0.5)
    for activation in ACTIVATIONS:
        out = matrix.product(x, norm, gated(activation))
        torch.testing.assert_close(out.float(), activate_reference(expected, activation), rtol=0.02, atol=4e-3 * inputs)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "activation", "tiles"),
    [
        (layouts.Q4, "silu", PackedTiles(64, 2, 4, 3, 2, 255)),
        (layouts.Q6, "gelu_tanh", PackedTiles(128, 2, 8, 3, 1, 128)),
    ],
)
def test_gated_rows_agree_with_the_dequantised_matrices(
    layout: Layout, activation: str, tiles: PackedTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "small_batch_tiles", lambda *_: tiles)
    outputs, inputs = tiles.outputs // 2 + 8, 512  # two programs, the second with outputs that do not exist
    matrix = random_matrix(layout, 2 * outputs, inputs)
    x = (torch.randn(9, inputs, device=DEVICE) * inputs**-0.5).to(KIND)
    expected = activate_reference(x.float() @ matrix.values().t(), activation)
    torch.testing.assert_close(matrix.product(x, PLAIN, gated(activation)).float(), expected, rtol=0.02, atol=0.03)


@needs_kernels
@pytest.mark.parametrize("inputs", [160, 1024, 5120])
@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32])
def test_one_row_in_half_precision_takes_norms_of_both_dtypes(inputs: int, norm_dtype: torch.dtype) -> None:
    matrix = random_matrix(layouts.Q4, 21, inputs)
    x = torch.randn(1, inputs, device=DEVICE).to(torch.bfloat16)
    norm = torch.rand(inputs, device=DEVICE).to(norm_dtype)
    value = torch.nn.functional.rms_norm(x.float(), (inputs,), norm.float(), 1e-6)
    out = matrix.product(x, Prologue(norm, 1e-6))
    torch.testing.assert_close(out.float(), value @ matrix.values().t(), rtol=0.02, atol=4e-3 * inputs**0.5)
