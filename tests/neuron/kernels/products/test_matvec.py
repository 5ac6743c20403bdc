import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.products.matvec import gated_matvec, gated_matvec_reference, matvec, matvec_reference

SHAPES = [(576, 130), (2500, 17), (100, 7)]


@pytest.mark.parametrize("rows", [1, 3, 16, 29])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("extras", ["", "norm", "norm bias residual"])
def test_matvec_matches_its_reference(
    rows: int,
    inputs: int,
    outputs: int,
    extras: str,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    x, weight = random(rows, inputs), random(outputs, inputs) * inputs**-0.5
    bias = random(outputs) if "bias" in extras else None
    norm = random(inputs) if "norm" in extras else None
    residual = random(rows, outputs) if "residual" in extras else None
    exact_bias, exact_norm, exact_residual = (None if t is None else t.float() for t in (bias, norm, residual))
    reference = matvec_reference(x.float(), weight.float(), exact_bias, exact_norm, 1e-6, exact_residual)
    assert_close(matvec(x, weight, bias, norm, 1e-6, residual), reference)


@pytest.mark.parametrize("rows", [1, 3, 16, 29])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_gated_matvec_matches_its_reference(
    rows: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    weight = torch.randn(2 * outputs, inputs, device=device, dtype=dtype) * inputs**-0.5
    norm = torch.randn(inputs, device=device, dtype=dtype)
    assert_close(
        gated_matvec(x, weight, norm, 1e-6), gated_matvec_reference(x.float(), weight.float(), norm.float(), 1e-6)
    )
