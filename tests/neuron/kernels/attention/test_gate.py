"""The gate on attention's output, against its reference."""

from __future__ import annotations

import pytest
import torch

from cortex.neuron.kernels.attention.gate import gate_heads, gate_heads_reference
from cortex.neuron.kernels.jit import INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("softplus", [False, True])
def test_result_agrees_with_the_reference(softplus: bool) -> None:
    torch.manual_seed(0)
    for tokens, heads, dim in ((1, 5, 24), (3, 16, 80)):
        mixed = torch.randn(tokens, heads, dim, device=DEVICE)
        joint = 30 * torch.randn(tokens, heads, 2 * dim, device=DEVICE)  # a query's half comes first
        for gate in (joint[..., dim:], joint[..., :1]):
            result = gate_heads(mixed, gate, softplus=softplus)
            torch.testing.assert_close(result, gate_heads_reference(mixed, gate, softplus=softplus))
