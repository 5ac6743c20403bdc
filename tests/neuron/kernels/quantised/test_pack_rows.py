"""The kernels that fill a packed matrix write what the plain torch code writes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised.codes import (
    PackedCodes,
    empty_codes,
    pack_codes,
    pack_codes_reference,
    pack_values,
    unpacked,
)
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.quantise import quantised

LAYOUTS = [layouts.Q2, layouts.Q3, layouts.Q4, layouts.Q5, layouts.Q6, layouts.Q8]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.bits}bit")
ROWS = 37


def values_like(kind: str, columns: int, device: torch.device) -> Tensor:
    if kind == "normal":
        return torch.randn(ROWS, columns, device=device).bfloat16()
    # Multiples of 1/64, whose sums are exact in float32: no order of additions changes them.
    return torch.randint(-64, 65, (ROWS, columns), device=device).to(torch.bfloat16) / 64


def both(layout: Layout, values: Tensor) -> tuple[PackedCodes, PackedCodes]:
    """The results of the kernel and of plain torch. The memory has other contents before."""
    rows, columns = values.shape
    made = empty_codes(layout, rows, columns, values.device), empty_codes(layout, rows, columns, values.device)
    for matrix in made:
        for tensor in matrix.tensors:
            tensor.fill_(77)
    pack_values(values, layout, *made[0].tensors)
    pack_codes_reference(*quantised(values, layout), layout, *made[1].tensors)
    return made


@each_layout
@pytest.mark.parametrize("columns", [32, 160, 384])
def test_exact_numbers_are_packed_to_the_same_bits(layout: Layout, columns: int, device: torch.device) -> None:
    kernel, plain = both(layout, values_like("exact", columns, device))
    for ours, theirs in zip(kernel.tensors, plain.tensors, strict=True):
        assert torch.equal(ours, theirs)


@each_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_numbers_are_packed_with_the_same_error(layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    """Another order of additions may round a few scales to a neighbour."""
    values = values_like("normal", 1024, device).to(dtype)
    kernel, plain = both(layout, values)
    ours, theirs = ((unpacked(matrix) - values.float()).norm() for matrix in (kernel, plain))
    assert ours <= theirs * 1.001
    same = sum(int((mine == other).sum()) for mine, other in zip(kernel.tensors, plain.tensors, strict=True))
    assert same >= 0.98 * sum(tensor.numel() for tensor in plain.tensors)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's own
@each_layout
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_with_a_value_that_is_not_finite_has_no_finite_values(
    layout: Layout, value: float, device: torch.device
) -> None:
    values = values_like("exact", 64, device)
    values[1, 40] = value
    for matrix in both(layout, values):
        is_finite = unpacked(matrix).isfinite()
        first = 40 // layout.group * layout.group
        assert not is_finite[1, first : first + layout.group].any()
        assert int(is_finite.sum()) == values.numel() - layout.group


@pytest.mark.parametrize("layout", [*LAYOUTS, layouts.IQ4], ids=lambda layout: f"{layout.bits}bit")
@pytest.mark.parametrize("columns", [32, 160, 384])
def test_codes_are_packed_to_the_same_bits(layout: Layout, columns: int, device: torch.device) -> None:
    groups = columns // layout.group
    code = torch.randint(0, 1 << layout.bits, (ROWS, columns), dtype=torch.uint8, device=device)
    scale, minimum = torch.randn(2, ROWS, groups, device=device)
    made = empty_codes(layout, ROWS, columns, device), empty_codes(layout, ROWS, columns, device)
    pack_codes(code, scale, minimum, layout, *made[0].tensors)
    pack_codes_reference(code, scale, minimum, layout, *made[1].tensors)
    for ours, theirs in zip(made[0].tensors, made[1].tensors, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", [*LAYOUTS, layouts.IQ4], ids=lambda layout: f"{layout.bits}bit")
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001], ids=hex)
def test_scales_that_are_no_numbers_stay_visible(layout: Layout, bits: int, device: torch.device) -> None:
    code = torch.zeros(ROWS, 32, dtype=torch.uint8, device=device)
    scale = torch.full((ROWS, 32 // layout.group), bits, dtype=torch.int32, device=device).view(torch.float32)
    matrix = empty_codes(layout, ROWS, 32, device)
    pack_codes(code, scale, scale, layout, *matrix.tensors)
    assert unpacked(matrix).isnan().all()
