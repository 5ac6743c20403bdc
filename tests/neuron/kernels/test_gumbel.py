"""Noise for sampling tokens: finite for every hash, and with the right distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cortex.neuron.kernels.sampling.gumbel import NOISE_BITS, gumbel_noise, noise_of_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LARGE_VOCAB = 151_936
MANTISSA = 24


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def all_mantissas(exponent: int, device: torch.device) -> Tensor:
    """One value for each float32 between two powers of two, and the last value below the upper one."""
    step = max(1, 2 ** (exponent + 1 - MANTISSA))
    first = 2**exponent
    bits = first + torch.arange(0, first, step, device=device)
    return torch.cat((bits, torch.tensor([2 * first - 1], device=device)))


def sample_counts(logits: Tensor, num_draws: int) -> Tensor:
    """How often each token has the largest sum of logit and noise, over many seeds and positions."""
    vocab = len(logits)
    rows = max(1, 2**22 // vocab)
    counts = torch.zeros(vocab, dtype=torch.int64, device=logits.device)
    for first in range(0, num_draws, rows):
        numbers = torch.arange(first, min(first + rows, num_draws), device=logits.device)
        tokens = (logits + gumbel_noise(numbers // 512, numbers % 512, vocab)).argmax(-1)
        counts += tokens.bincount(minlength=vocab)
    return counts


def chi_square_excess(counts: Tensor, probabilities: Tensor) -> float:
    """Standard deviations by which the statistic exceeds its mean. Rarely expected tokens are pooled."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    seen = torch.cat((counts[~rare].double(), counts[rare].sum().double()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    keep = expected > 0
    statistic = ((seen[keep] - expected[keep]) ** 2 / expected[keep]).sum().item()
    freedom = max(1, int(keep.sum()) - 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_noise_is_finite_and_decreasing_for_every_value(device: torch.device) -> None:
    """Bits become a float32, so there is one value of noise for each float32. A CPU computes the magnitude in which
    rounding reaches 1, the one below it and those around the mantissa's size; the next test has the ends of all."""
    few = (NOISE_BITS - 1, NOISE_BITS - 2, MANTISSA, MANTISSA - 1, 0)
    for exponent in few if device.type == "cpu" else range(NOISE_BITS):
        noise = noise_of_bits(all_mantissas(exponent, device))
        assert noise.isfinite().all(), exponent
        assert (noise.diff() <= 1e-6).all(), "larger bits must give smaller noise"


def test_noise_is_finite_and_decreasing_at_both_ends_of_every_magnitude(device: torch.device) -> None:
    ends = sorted({0, *(2**power - 1 for power in range(1, 64)), *(2**power for power in range(63))})
    noise = noise_of_bits(torch.tensor(ends, device=device))
    assert noise.isfinite().all()
    assert (noise.diff() <= 1e-6).all()
    assert noise[0].item() == pytest.approx((NOISE_BITS + 1) * math.log(2))
    assert noise[-1].item() == pytest.approx(-math.log(MANTISSA * math.log(2)), rel=1e-5)


def test_noise_matches_the_noise_computed_in_double_precision(device: torch.device) -> None:
    bits = [0, 1, 12345, 2**40, 2**60 + 7, 2**62, 2**62 + 2**61, 2**63 - 2**42]
    exact = [-math.log(-math.log1p(-(value + 0.5) / 2**NOISE_BITS)) for value in bits]
    noise = noise_of_bits(torch.tensor(bits, device=device))
    torch.testing.assert_close(noise.cpu(), torch.tensor(exact), rtol=1e-5, atol=1e-5)


def test_small_seeds_positions_and_tokens_give_no_outlier(device: torch.device) -> None:
    """A hash that maps 0 to 0 would give one of them the largest possible noise."""
    numbers = torch.arange(-512, 512, device=device)
    for position in range(4):
        noise = gumbel_noise(numbers, torch.full_like(numbers, position), 256)
        assert noise.max().item() < math.log(noise.numel()) + 14


def test_masked_token_is_never_sampled(device: torch.device) -> None:
    """Every second token is masked. Noise that is infinite for one hash in 2**24 would fail this test on a GPU. What a
    CPU computes for every hash is finite: the first test."""
    num_draws = 1_000_000 if device.type == "cpu" else 10_000_000
    vocab = 8
    logits = torch.zeros(vocab, device=device)
    logits[::2] = -torch.inf
    counts = sample_counts(logits, num_draws)
    assert counts.sum() == num_draws
    assert counts[::2].sum() == 0
    assert chi_square_excess(counts[1::2], torch.full((vocab // 2,), 2 / vocab, device=device)) < 5


@pytest.mark.parametrize("vocab", [2, 24, 1000])
def test_sample_frequencies_match_the_probabilities(vocab: int, device: torch.device) -> None:
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2).to(device)
    counts = sample_counts(logits, 4_000_000 // vocab)
    assert chi_square_excess(counts, logits.softmax(-1)) < 5


def test_sample_frequencies_match_the_probabilities_of_a_large_vocabulary(device: torch.device) -> None:
    """Half of the probability is on 64 tokens, the rest is spread over all others in a long tail."""
    num_draws = 64 if device.type == "cpu" else 40_000
    tail = -torch.arange(LARGE_VOCAB - 64, dtype=torch.float64).log1p()
    head = torch.full((64,), (tail.logsumexp(0) - math.log(64)).item(), dtype=torch.float64)
    logits = torch.cat((head, tail)).float().to(device)
    counts = sample_counts(logits, num_draws)
    assert chi_square_excess(counts, logits.softmax(-1)) < 5
    halves = torch.stack((counts[:64].sum(), counts[64:].sum()))
    assert chi_square_excess(halves, torch.tensor([0.5, 0.5], device=device)) < 5


def test_uniform_large_vocabulary_does_not_favour_small_token_ids(device: torch.device) -> None:
    """argmax takes the first of equal sums, so coarse noise would favour small token ids."""
    num_draws = 64 if device.type == "cpu" else 200_000
    counts = sample_counts(torch.zeros(LARGE_VOCAB, device=device), num_draws)
    parts = counts.view(8, -1).sum(1)
    assert chi_square_excess(parts, torch.full((8,), 1 / 8, device=device)) < 5
