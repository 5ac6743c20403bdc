"""The argmax of each row and whether its logits are finite."""

from __future__ import annotations

import pytest
import torch

from cortex.neuron.kernels.greedy import argmax, argmax_reference


@pytest.mark.parametrize(("rows", "vocab"), [(1, 100), (3, 4096), (2, 9001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_argmax_is_the_first_of_the_highest(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(rows, vocab + 8, device=device).to(dtype)[:, :vocab]
    logits[:, vocab // 2 :: 7] = logits.max()
    tokens, healthy = argmax(logits)
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert tokens.dtype == torch.int64
    assert healthy.tolist() == [True] * rows


@pytest.mark.parametrize("vocab", [10, 5000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_row_with_a_logit_that_is_no_number_is_not_healthy(vocab: int, bad: float, device: torch.device) -> None:
    logits = torch.randn(3, vocab, device=device)
    logits[1, vocab - 1] = bad
    tokens, healthy = argmax(logits)
    assert healthy.tolist() == [True, False, True]
    expected, same = argmax_reference(logits)
    assert (tokens[::2].tolist(), healthy.tolist()) == (expected[::2].tolist(), same.tolist())


def test_row_without_any_possible_token_is_not_healthy(device: torch.device) -> None:
    assert argmax(torch.full((1, 300), float("-inf"), device=device))[1].tolist() == [False]
