"""The gated addition of a shared expert's result, against its reference."""

from __future__ import annotations

import pytest
import torch
from tests.neuron.kernels.moe.test_quantised import DEVICE, KIND, needs_kernels

from cortex.neuron.kernels.moe.shared_gate import add_gated, add_gated_reference


@needs_kernels
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 160), (3, 40)])
@pytest.mark.parametrize("norm_dtype", [KIND, torch.float32])
def test_result_agrees_with_the_reference(tokens: int, hidden: int, norm_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    part, x, residual = torch.randn(3, tokens, hidden, device=DEVICE).to(KIND)
    norm_weight, gate = torch.rand(hidden, device=DEVICE).to(norm_dtype), torch.randn(1, hidden, device=DEVICE).to(KIND)
    expected = add_gated_reference(part, x, norm_weight, 1e-6, gate, residual)
    result = add_gated(part, x, norm_weight, 1e-6, gate, residual)
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.03)
