"""Matrices in eight-bit floating point: what is put comes back, and products agree with the widened matrix."""

from __future__ import annotations

import pytest
import torch

from cortex.neuron.kernels.activations import ACTIVATIONS, activate_reference
from cortex.neuron.kernels.float8.codes import FLOAT8, Float8Codes, empty_float8_codes, widened
from cortex.neuron.kernels.float8.layout import FLOAT8_BLOCKS, FLOAT8_ROWS, Float8Layout, float8_layout
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.float8.one_row import one_row_float8_product, one_row_reference
from cortex.neuron.kernels.float8.product import float8_product, float8_product_reference, widened_product
from cortex.neuron.kernels.float8.rows import float8_rows, float8_rows_reference
from cortex.neuron.kernels.float8.support import has_float8_products, has_library_product
from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.matrix import BARE, PLAIN, Epilogue, Prologue
from cortex.neuron.kernels.norm import rms_norm_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU or TRITON_INTERPRET=1"
)
KIND = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter multiplies no bfloat16
ROUNDING = 0.02 if DEVICE.type == "cuda" else 0.1  # the interpreter cuts bits off
LAYOUTS = [FLOAT8_BLOCKS, FLOAT8_ROWS]


@pytest.fixture(autouse=True)
def _same_values() -> None:
    """Some of a few random rows are rounded further than the limit where the interpreter cuts bits off."""
    torch.manual_seed(0)


def random_matrix(layout: Float8Layout, outputs: int, inputs: int) -> Float8Codes:
    """Whose blocks differ a thousandfold in size."""
    matrix = empty_float8_codes(layout, outputs, inputs, DEVICE)
    values = torch.randn(outputs, inputs, device=DEVICE)
    matrix.put_values(0, values)
    matrix.scales.mul_(torch.logspace(-2, 1, matrix.scales.numel(), device=DEVICE).view_as(matrix.scales))
    return matrix


def random_rows(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns, device=DEVICE) * torch.logspace(-2, 2, columns, device=DEVICE)).to(KIND)


def assert_near(out: torch.Tensor, expected: torch.Tensor, limit: float = 0.01) -> None:
    assert out.shape == expected.shape
    assert torch.isfinite(out).all()
    assert (out.float() - expected.float()).norm() / expected.float().norm() < limit


@pytest.mark.parametrize(
    ("shape", "scaled", "expected"),
    [
        ((256, 512), (128, 128), FLOAT8_BLOCKS),
        ((200, 512), (128, 128), None),
        ((256, 500), (128, 128), None),
        ((256, 512), (64, 64), None),
        ((256, 512), (1, 512), FLOAT8_ROWS),
        ((256, 512), (256, 512), FLOAT8_ROWS),
        ((256, 512), (2, 512), None),
        ((250, 512), (1, 512), None),
        ((256, 512), (1, 128), None),
        ((256, 512), None, None),
    ],
)
def test_layout_by_the_shape_and_what_shares_a_scale(
    shape: tuple[int, int], scaled: tuple[int, int] | None, expected: Float8Layout | None
) -> None:
    assert float8_layout(shape, scaled) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_num_bytes_is_what_the_tensors_take(layout: Float8Layout) -> None:
    assert layout.num_bytes(256, 384) == Float8Matrix(layout, 256, 384, DEVICE).num_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_put_in_pieces_come_back(layout: Float8Layout) -> None:
    codes = torch.randn(256, 384, device=DEVICE).to(FLOAT8)
    scales = torch.rand(layout.num_scales(256, 384), device=DEVICE) + 0.5
    by_row = scales.repeat_interleave(layout.block or 1, 0)
    matrix = Float8Matrix(layout, 256, 384, DEVICE)
    for first, last in ((192, 256), (0, 64), (64, 192)):
        matrix.put_float8(first, codes[first:last], by_row[first:last])
    expected = codes.float() * by_row.repeat_interleave(layout.block or 384, 1)
    torch.testing.assert_close(matrix.values(), expected, rtol=0, atol=0)
    ids = torch.tensor([3, 130, 3], device=DEVICE)
    torch.testing.assert_close(matrix.rows(ids, torch.float32), expected[ids], rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_rounded_by_at_most_a_sixteenth(layout: Float8Layout) -> None:
    values = torch.randn(256, 384, device=DEVICE)
    values[:128, :128] = 0
    matrix = empty_float8_codes(layout, 256, 384, DEVICE)
    matrix.put_values(0, values)
    assert ((widened(matrix) - values).abs() <= values.abs() / 16 + 2e-5).all()


@needs_kernels
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 128), (3, 384), (17, 1536)])
def test_rows_are_rounded_as_the_reference_rounds_them(grouped: bool, rows: int, inputs: int) -> None:
    x = random_rows(rows, inputs)
    x[0, :100] = 0
    rounded, expected = float8_rows(x, grouped=grouped), float8_rows_reference(x, grouped=grouped)
    torch.testing.assert_close(rounded.scales[:, :rows], expected.scales, rtol=1e-6, atol=0)
    assert_near(rounded.codes[:rows].float(), expected.codes.float(), ROUNDING)
    assert len(rounded.codes) % 16 == 0


@needs_kernels
@pytest.mark.parametrize("grouped", [True, False])
def test_norm_and_activation_come_before_the_rounding(grouped: bool) -> None:
    x, weight = random_rows(5, 512), torch.rand(512, device=DEVICE)
    normed = float8_rows(x, Prologue(weight, 1e-5), grouped=grouped)
    expected = float8_rows_reference(rms_norm_reference(x.float(), weight, 1e-5), grouped=grouped)
    torch.testing.assert_close(normed.scales[:, :5], expected.scales, rtol=1e-4, atol=1e-9)
    assert_near(normed.codes[:5].float(), expected.codes.float(), ROUNDING)
    both = random_rows(5, 1024) / 10
    for activation in ACTIVATIONS:
        activated = float8_rows(both, Prologue(activation=activation), grouped=grouped)
        expected = float8_rows_reference(activate_reference(both.float(), activation), grouped=grouped)
        torch.testing.assert_close(activated.scales[:, :5], expected.scales, rtol=1e-4, atol=1e-9)
        assert_near(activated.codes[:5].float(), expected.codes.float(), ROUNDING)


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(2, 128, 256), (17, 128, 1536), (64, 256, 128), (130, 128, 384)]
)
def test_product_of_rounded_rows_agrees_with_the_reference(
    layout: Float8Layout, rows: int, outputs: int, inputs: int
) -> None:
    matrix, x = random_matrix(layout, outputs, inputs), random_rows(rows, inputs)
    bias, residual = torch.randn(outputs, device=DEVICE).to(KIND), torch.randn(rows, outputs, device=DEVICE).to(KIND)
    rounded = float8_rows(x, grouped=layout.block > 0)
    for _ in range(2):  # the second finds the counters as the first left them
        out = float8_product(rounded, matrix, Epilogue(bias, residual))
        assert_near(out, float8_product_reference(rounded, matrix, Epilogue(bias, residual)))


@needs_kernels
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 96, 256), (17, 64, 1536)])
def test_gated_product_of_rounded_rows_agrees_with_the_reference(rows: int, outputs: int, inputs: int) -> None:
    matrix, x = random_matrix(FLOAT8_ROWS, 2 * outputs, inputs), random_rows(rows, inputs) / 1000
    rounded = float8_rows(x, grouped=False)
    for activation in ACTIVATIONS:
        expected = activate_reference(float8_product_reference(rounded, matrix), activation)
        assert_near(float8_product(rounded, matrix, Epilogue(activation=activation)), expected)


@pytest.mark.parametrize(
    ("layout", "inputs", "capability", "cuda", "expected"),
    [
        (FLOAT8_BLOCKS, 1024, (9, 0), (12, 9), True),
        (FLOAT8_BLOCKS, 1024, (9, 0), (12, 8), False),
        (FLOAT8_BLOCKS, 1152, (9, 0), (13, 0), False),
        (FLOAT8_BLOCKS, 1024, (8, 9), (13, 0), False),
        (FLOAT8_BLOCKS, 1024, (10, 0), (13, 0), False),
        (FLOAT8_ROWS, 1152, (8, 9), (12, 8), True),
        (FLOAT8_ROWS, 1152, (12, 0), (13, 0), True),
        (FLOAT8_ROWS, 1152, (0, 0), (0,), False),
    ],
)
def test_library_multiplies_only_what_it_supports(
    layout: Float8Layout, inputs: int, capability: tuple[int, int], cuda: tuple[int, ...], expected: bool
) -> None:
    assert has_library_product(layout, inputs, capability, cuda) is expected


@pytest.mark.skipif(not has_float8_products(DEVICE), reason="needs a GPU with FP8 tensor cores")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "inputs"), [(65, 1536), (129, 1152), (1000, 1536)])
def test_product_with_a_large_batch_agrees_with_the_reference(layout: Float8Layout, rows: int, inputs: int) -> None:
    matrix, x = random_matrix(layout, 384, inputs), random_rows(rows, inputs)
    bias, residual = torch.randn(384, device=DEVICE).to(KIND), torch.randn(rows, 384, device=DEVICE).to(KIND)
    rounded = float8_rows(x, grouped=layout.block > 0)
    expected = float8_product_reference(rounded, matrix, Epilogue(bias, residual))
    assert_near(float8_product(rounded, matrix, Epilogue(bias, residual)), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 128, 256), (17, 128, 1536), (70, 256, 384)])
def test_product_with_the_widened_matrix_agrees_with_it(
    layout: Float8Layout, rows: int, outputs: int, inputs: int
) -> None:
    matrix, x = random_matrix(layout, outputs, inputs), random_rows(rows, inputs)
    bias, residual = torch.randn(outputs, device=DEVICE).to(KIND), torch.randn(rows, outputs, device=DEVICE).to(KIND)
    expected = x.float() @ widened(matrix).t() + bias.float() + residual.float()
    out = residual.clone()
    widened_product(x, matrix, Epilogue(bias, out), out)
    assert_near(out, expected)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "outputs", "inputs", "normed"),
    [
        (FLOAT8_BLOCKS, 128, 128, True),
        (FLOAT8_ROWS, 130, 128, False),
        (FLOAT8_BLOCKS, 128, 1152, False),
        (FLOAT8_ROWS, 128, 8320, True),
        (FLOAT8_BLOCKS, 128, 8320, False),
        (FLOAT8_ROWS, 32, 16512, True),
        (FLOAT8_BLOCKS, 128, 16512, False),
    ],
)
def test_one_row_keeps_its_precision(layout: Float8Layout, outputs: int, inputs: int, normed: bool) -> None:
    """Blocks of rows that are whole and not, rows that fit in a program and that go by in pieces."""
    matrix, x = random_matrix(layout, outputs, inputs), random_rows(1, inputs)
    weight = torch.rand(inputs, device=DEVICE).to(KIND) if normed else None
    bias, residual = (torch.randn(1, outputs, device=DEVICE).to(KIND) for _ in range(2))
    out = torch.full((1, outputs), torch.nan, dtype=KIND, device=DEVICE)
    prologue, epilogue = Prologue(weight, 1e-6), Epilogue(bias[0], residual)
    one_row_float8_product(x, matrix, out, prologue, epilogue)
    assert_near(out, one_row_reference(x, matrix, prologue, epilogue))


@needs_kernels
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20])
def test_one_row_of_any_size(size: float) -> None:
    """The row is multiplied in float16, in units of its own."""
    matrix = random_matrix(FLOAT8_ROWS, 16, 128)
    x = random_rows(1, 128) * size
    out = torch.full((1, 16), torch.nan, dtype=KIND, device=DEVICE)
    one_row_float8_product(x, matrix, out, PLAIN, BARE)
    expected = one_row_reference(x, matrix, PLAIN, BARE)
    assert_near(out / (size or 1) + 1, expected / (size or 1) + 1)


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_row_through_gate_and_up(layout: Float8Layout) -> None:
    matrix, x = random_matrix(layout, 256, 384), random_rows(1, 384) / 100
    weight = torch.rand(384, device=DEVICE).to(KIND)
    for activation in ACTIVATIONS:
        prologue, epilogue = Prologue(weight, 1e-6), Epilogue(activation=activation)
        out = torch.full((1, 128), torch.nan, dtype=KIND, device=DEVICE)
        one_row_float8_product(x, matrix, out, prologue, epilogue)
        assert_near(out, one_row_reference(x, matrix, prologue, epilogue))
