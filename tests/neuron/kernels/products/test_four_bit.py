"""Four-bit matrices match their dequantised values, and are used only where they are faster."""

import pytest
import torch

from cortex.neuron.kernels.products import four_bit
from cortex.neuron.kernels.products.four_bit import FourBitMatrix, max_four_bit_rows
from cortex.neuron.kernels.products.four_bit_size import GROUP, ROW_BLOCK, four_bit_bytes


def random_groups(bits: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(bits)
    shape = (outputs, inputs // GROUP, 1)
    q = torch.randint(0, 1 << bits, (*shape[:2], GROUP), dtype=torch.uint8, generator=generator)
    scale = torch.rand(shape, generator=generator).bfloat16().float() / (1 << bits)
    return q, scale, -scale * torch.randint(1, 1 << bits, shape, generator=generator)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_matches_the_dequantised_product(bits: int, rows: int, dtype: torch.dtype) -> None:
    outputs, inputs = 3 * ROW_BLOCK, 96
    q, scale, minimum = random_groups(bits, outputs, inputs)
    planes = bits // 4
    matrix = FourBitMatrix(
        torch.empty(outputs, planes * inputs // 2, dtype=torch.uint8),
        torch.empty(planes * inputs // GROUP, outputs, 2, dtype=torch.bfloat16),
        planes,
        max_rows=8,
    )
    assert matrix.packed.nbytes + matrix.scales.nbytes == four_bit_bytes(outputs, inputs, bits)
    for part in (slice(0, ROW_BLOCK), slice(ROW_BLOCK, outputs)):
        matrix.put(part.start, q[part], scale[part], minimum[part])
    x = torch.randn(rows, inputs).to(dtype)
    y = matrix.product(x)
    expected = x.bfloat16().double() @ (q * scale + minimum).flatten(1).double().T
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    assert (y.double() - expected).norm() / expected.norm() < 0.01


def test_max_rows_are_measured_once_and_the_thread_count_is_restored() -> None:
    threads = torch.get_num_threads()
    max_four_bit_rows.cache_clear()
    max_rows = max_four_bit_rows(torch.float32)
    assert max_rows in (0, 1, 2, 4, 8, 16)
    assert max_four_bit_rows(torch.float32) == max_rows
    assert torch.get_num_threads() == threads


def test_max_rows_are_zero_if_four_bits_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bit, "shortest_times_s", lambda *_: [2.0, 1.0])
    max_four_bit_rows.cache_clear()
    assert max_four_bit_rows(torch.float32) == 0
    max_four_bit_rows.cache_clear()
