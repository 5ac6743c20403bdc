import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose, combinations

from cortex.neuron.kernels.activations import ACTIVATIONS
from cortex.neuron.kernels.dense.matrix import DenseMatrix, small_product_reference
from cortex.neuron.kernels.matrix import Epilogue, Prologue

SHAPES = [(576, 130), (2500, 17), (100, 7), (8, 24)]


@pytest.mark.parametrize(
    ("rows", "shape", "extras"),
    combinations([1, 3, 16, 29], SHAPES, ["", "norm", "norm bias residual", *ACTIVATIONS], one_of=2),
)
def test_small_product_matches_its_reference(
    rows: int,
    shape: tuple[int, int],
    extras: str,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    inputs, outputs = shape
    activation = extras if extras in ACTIVATIONS else None
    x, weight = random(rows, inputs), random(outputs * (1 if activation is None else 2), inputs) * inputs**-0.5
    bias = random(outputs) if "bias" in extras else None
    norm = random(inputs) if "norm" in extras or activation else None
    residual = random(rows, outputs) if "residual" in extras else None
    exact_bias, exact_norm, exact_residual = (None if t is None else t.float() for t in (bias, norm, residual))
    reference = small_product_reference(
        x.float(), weight.float(), Prologue(exact_norm, 1e-6), Epilogue(exact_bias, exact_residual, activation)
    )
    assert_close(DenseMatrix(weight).product(x, Prologue(norm, 1e-6), Epilogue(bias, residual, activation)), reference)
