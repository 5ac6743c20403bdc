import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.dense import small_batch
from cortex.neuron.kernels.dense.blocks import Blocks
from cortex.neuron.kernels.dense.matrix import small_product_reference
from cortex.neuron.kernels.dense.small_batch import small_batch_product
from cortex.neuron.kernels.matrix import PLAIN, Epilogue

BLOCKS = {
    "one block": Blocks(16, 64, warps=4, stages=3),
    "two blocks": Blocks(32, 16, warps=4, stages=3, more_outputs=16),
    "stretches": Blocks(32, 32, warps=4, stages=3, split=2),
    "stretches of two blocks": Blocks(32, 16, warps=4, stages=3, more_outputs=16, split=3),
}


@pytest.mark.parametrize("rows", [5, 61])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_each_cut_into_programs_gives_the_product(
    rows: int,
    activation: str | None,
    blocks: str,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    monkeypatch.setattr(small_batch, "small_batch_blocks", lambda *_, **__: BLOCKS[blocks])
    inputs, outputs = 192, 70
    x, weight = random(rows, inputs), random(outputs * (1 if activation is None else 2), inputs) * inputs**-0.5
    bias, residual = (random(outputs), random(rows, outputs)) if activation is None else (None, None)
    exact_bias, exact_residual = (None if t is None else t.float() for t in (bias, residual))
    reference = small_product_reference(
        x.float(), weight.float(), PLAIN, Epilogue(exact_bias, exact_residual, activation)
    )
    counters = torch.zeros(3, dtype=torch.int32, device=device)
    for _ in range(2):  # the second finds the counters as the first left them
        out = torch.empty(rows, outputs, device=device, dtype=dtype)
        small_batch_product(x, weight, counters, Epilogue(bias, residual, activation), out)
        assert_close(out, reference)
