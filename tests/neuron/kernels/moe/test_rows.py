import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.routing import ExpertChoice
from cortex.neuron.kernels.moe.rows import (
    contract_rows,
    contract_rows_reference,
    expand_rows,
    expand_rows_reference,
)


def random_case(
    rows: int, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Experts, ExpertChoice, torch.Tensor, torch.Tensor]:
    """Experts, a choice, the rows, and the values between the two products."""
    hidden, inner, count, slots = shape

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    gate_up, down = random(count, 2 * inner, hidden) * hidden**-0.5, random(count, hidden, inner) * inner**-0.5
    chosen = torch.stack([torch.randperm(count)[:slots] for _ in range(rows)])
    choice = ExpertChoice(chosen.int().to(device), torch.rand(rows, slots, device=device))
    experts = Experts(random(count, hidden), gate_up, down, slots, True)
    return experts, choice, random(rows, hidden), random(rows, slots, inner)


def exact(experts: Experts) -> Experts:
    return Experts(experts.router.float(), experts.gate_up.float(), experts.down.float(), experts.top_k, True)


# Hidden, inner, experts, experts per row; the last shape is larger than one iteration of a program.
@pytest.mark.parametrize("shape", [(64, 12, 6, 2), (33, 7, 5, 5), (2100, 3, 2, 1)])
@pytest.mark.parametrize("rows", [1, 3])
def test_first_product_matches_its_reference(
    rows: int, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    experts, choice, x, _ = random_case(rows, shape, device, dtype)
    norm = torch.randn(shape[0], device=device, dtype=dtype)
    reference = expand_rows_reference(x.float(), norm.float(), 1e-6, choice, exact(experts))
    assert_close(expand_rows(x, norm, 1e-6, choice, experts), reference)


@pytest.mark.parametrize("shape", [(20, 12, 6, 2), (9, 40, 5, 5), (4, 1100, 8, 6)])
@pytest.mark.parametrize("rows", [1, 3])
def test_second_product_and_sum_match_their_reference(
    rows: int, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    experts, choice, residual, inner = random_case(rows, shape, device, dtype)
    reference = contract_rows_reference(inner.float(), choice, residual.float(), exact(experts))
    assert_close(contract_rows(inner, choice, residual, experts), reference)
