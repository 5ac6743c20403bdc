"""The head: the most likely token must not depend on the rounding of half precision."""

import pytest
import torch

from cortex.neuron.layers.configs import NormConfig
from cortex.neuron.layers.embedding import Head
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters

VOCAB, HIDDEN = 300, 64


def make(dtype: torch.dtype) -> tuple[Head, RMSNorm, torch.Tensor]:
    parameters = Parameters(torch.device("cpu"), dtype)
    head, norm = Head(parameters, VOCAB, HIDDEN, "head", None), RMSNorm(parameters, HIDDEN, NormConfig(1e-6), "norm")
    # The rows of the matrix share a large component, so the logits are large compared to their differences.
    head.matrix.tensors[0].copy_(torch.randn(VOCAB, HIDDEN) * 0.1 + torch.randn(HIDDEN).sign())
    norm.weight.fill_(1.0)
    return head, norm, head.matrix.tensors[0].float().mean(0)


def exact(head: Head, norm: RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    return norm(hidden.float()) @ head.matrix.tensors[0].float().t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_most_likely_token_matches_float32(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    head, norm, common = make(dtype)
    for _ in range(20):
        hidden = (common + torch.randn(num_rows, HIDDEN) * 0.1).to(dtype)
        logits, expected = head.logits(hidden, norm), exact(head, norm, hidden)
        assert logits.dtype == torch.float32
        near = expected >= expected.amax(-1, keepdim=True) * 0.999
        assert near.sum() >= num_rows
        assert torch.allclose(logits[near], expected[near], rtol=1e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_logits_with_too_many_near_ties_are_not_recomputed() -> None:
    head, norm, _ = make(torch.bfloat16)
    head.matrix.tensors[0].fill_(0.5)
    hidden = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(head.logits(hidden, norm), head(hidden, norm=norm).float())


def test_float32_logits_are_not_recomputed() -> None:
    head, norm, common = make(torch.float32)
    hidden = common[None]
    assert torch.equal(head.logits(hidden, norm), head(hidden, norm=norm))
