"""The inverse of the triangular system of a chunk."""

import pytest
import torch

from cortex.neuron.kernels.delta.chunks import unit_inverse
from cortex.neuron.kernels.jit import jit, tl

LEVELS = 6


@jit
def _inverse_kernel(  # type: ignore[no-untyped-def]  # Triton would look annotations up
    system, out, levels: tl.constexpr, first: tl.constexpr, kind: tl.constexpr
):
    place = tl.arange(0, 1 << levels)
    where = place[:, None] * (1 << levels) + place[None, :]
    tl.store(out + where, unit_inverse(tl.load(system + where), levels, first, kind))


@pytest.mark.parametrize("first", [3, 4])
@pytest.mark.parametrize("keys", ["random", "equal", "alike"])
def test_the_inverse_of_a_system_of_unit_keys_is_exact(
    device: torch.device, dtype: torch.dtype, keys: str, first: int
) -> None:
    """The error stays far below the rounding of the inverse to bfloat16, also where its powers would grow."""
    size = 1 << LEVELS
    noise = {"random": 1.0, "equal": 0.0, "alike": 0.3}[keys]
    k = torch.randn(1, 32) * (noise < 1) + noise * torch.randn(size, 32)
    k /= k.norm(dim=1, keepdim=True)
    system = (k @ k.T).tril(-1).to(device)
    out = torch.empty_like(system)
    kind = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    _inverse_kernel[(1,)](system, out, levels=LEVELS, first=first, kind=kind, num_warps=4)
    expected = (torch.eye(size, dtype=torch.float64) + system.double().cpu()).inverse()
    assert (out.double().cpu() - expected).abs().max() < (1e-3 if dtype == torch.bfloat16 else 1e-5)
