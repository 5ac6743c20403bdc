import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.dense.expert_rows import (
    contract_block,
    contract_rows,
    contract_rows_reference,
    expand_rows,
    expand_rows_reference,
)
from cortex.neuron.kernels.expert_pairs import ExpertChoice
from cortex.neuron.kernels.matrix import Prologue


def random_choice(rows: int, experts: int, slots: int, device: torch.device) -> ExpertChoice:
    chosen = torch.stack([torch.randperm(experts)[:slots] for _ in range(rows)])
    return ExpertChoice(chosen.int().to(device), torch.rand(rows, slots, device=device))


# Hidden, inner, experts, experts per row; the last shape is larger than one iteration of a program.
@pytest.mark.parametrize("shape", [(64, 12, 6, 2), (33, 7, 5, 5), (2100, 3, 2, 1)])
@pytest.mark.parametrize(("rows", "activation"), [(1, "silu"), (3, "gelu_tanh")])
def test_first_product_matches_its_reference(
    rows: int,
    activation: str,
    shape: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    hidden, inner, experts, slots = shape
    choice = random_choice(rows, experts, slots, device)
    x, norm = torch.randn(rows, hidden, device=device, dtype=dtype), torch.randn(hidden, device=device, dtype=dtype)
    gate_up = torch.randn(experts * 2 * inner, hidden, device=device, dtype=dtype) * hidden**-0.5
    exact = Prologue(norm.float(), 1e-6)
    out = torch.full((rows * slots, inner), torch.nan, device=device, dtype=dtype)
    expand_rows(x, gate_up, choice, Prologue(norm, 1e-6), activation, out)
    assert_close(out, expand_rows_reference(x.float(), gate_up.float(), choice, exact, activation, experts))


@pytest.mark.parametrize("shape", [(20, 12, 6, 2), (9, 40, 5, 5), (4, 1100, 8, 6)])
@pytest.mark.parametrize("rows", [1, 3])
def test_second_product_and_sum_match_their_reference(
    rows: int, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    hidden, inner, experts, slots = shape
    choice = random_choice(rows, experts, slots, device)
    values = torch.randn(rows * slots, inner, device=device, dtype=dtype)
    residual = torch.randn(rows, hidden, device=device, dtype=dtype)
    down = torch.randn(experts * hidden, inner, device=device, dtype=dtype) * inner**-0.5
    reference = contract_rows_reference(values.float(), down.float(), choice, residual.float())
    assert_close(contract_rows(values, down, choice, residual), reference)


@pytest.mark.parametrize("rows", [1, 2])
def test_biases_of_experts_are_added_once(rows: int, device: torch.device, assert_close: AssertClose) -> None:
    hidden, inner, experts, slots = 12, 300, 4, 3
    choice = random_choice(rows, experts, slots, device)
    values, residual = torch.randn(rows * slots, inner, device=device), torch.randn(rows, hidden, device=device)
    down, bias = torch.randn(experts * hidden, inner, device=device), torch.randn(experts * hidden, device=device)
    expected = contract_rows_reference(values, down, choice, residual, bias)
    assert_close(contract_rows(values, down, choice, residual, bias), expected)


@pytest.mark.parametrize(
    ("inner", "rows", "slots", "block"),
    [
        (512, 1, 11, (2, 512, 11)),
        (512, 8, 11, (4, 512, 1)),
        (768, 2, 8, (4, 256, 1)),
        (1408, 1, 7, (2, 512, 4)),
        (12, 1, 2, (2, 16, 2)),
    ],
)
def test_second_product_reads_few_columns_that_do_not_exist(
    inner: int, rows: int, slots: int, block: tuple[int, int, int]
) -> None:
    assert contract_block(inner, rows, slots) == block
