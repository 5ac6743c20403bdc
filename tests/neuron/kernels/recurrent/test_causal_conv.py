"""The reference of the causal convolution, which is what CPUs compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from cortex.neuron.kernels.batch import PrefillRow
from cortex.neuron.kernels.recurrent.causal_conv import conv_chunk_reference, conv_rows_reference

TAPS, CHANNELS = 4, 80


def largest_difference(seed: int) -> float:
    """Between the tokens of a few chunks in one piece and one by one."""
    random = torch.Generator().manual_seed(seed)
    largest = 0.0
    for count in (33, 5, 1, 3) * 6:
        x, weight, bias = (
            torch.randn(*shape, generator=random) for shape in ((count, CHANNELS), (TAPS, CHANNELS), (CHANNELS,))
        )
        whole = torch.randn(2, TAPS, CHANNELS, generator=random)
        single = whole.clone()
        mixed = conv_chunk_reference(x, weight, whole, PrefillRow(1, 7, count, 0), bias)
        rows = torch.tensor([1])
        expected = torch.cat(
            [
                conv_rows_reference(token, weight, single, rows, torch.tensor([7 + number]), bias)
                for number, token in enumerate(x.split(1))
            ]
        )
        assert torch.equal(whole, single)
        largest = max(largest, float((mixed - expected).abs().max()))
    return largest


def test_chunks_are_convolved_like_their_tokens_also_while_another_thread_convolves() -> None:
    for _ in range(8):
        with ThreadPoolExecutor(2) as threads:
            assert max(threads.map(largest_difference, range(2))) < 1e-5
