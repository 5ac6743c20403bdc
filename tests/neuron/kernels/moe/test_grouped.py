import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.grouped import (
    Tiling,
    combine,
    combine_reference,
    contract_grouped,
    contract_grouped_reference,
    expand_grouped,
    expand_grouped_reference,
    max_tiles,
    tiling,
)
from cortex.neuron.kernels.moe.routing import list_pairs_reference
from cortex.neuron.kernels.shared_memory import SMALLEST

TILES = [Tiling(16, 16, 16, 4), Tiling(32, 64, 32, 4)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", [(64, 32, 6, 0), (40, 25, 7, 1)])
@pytest.mark.parametrize(("tokens", "bias"), [(5, 0.0), (41, 0.0), (41, 9.0)])
def test_products_and_sum_match_their_references(
    tile: Tiling,
    shape: tuple[int, int, int, int],
    tokens: int,
    bias: float,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    """`bias` routes every token to the same expert, which then has several tiles while others have none."""
    hidden, inner, routed, shared = shape

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    router = random(routed + bool(shared), hidden)
    gate_up = random(routed + shared, 2 * inner, hidden) * hidden**-0.5
    down = random(routed + shared, hidden, inner) * inner**-0.5
    x, residual = random(tokens, hidden), random(tokens, hidden)
    logits = random(tokens, len(router)).float()
    logits[:, 2] += bias
    exact = Experts(router.float(), gate_up.float(), down.float(), 2, True, shared)
    experts = Experts(router, gate_up, down, 2, True, shared)
    lists = list_pairs_reference(logits, exact)

    middle = expand_grouped_reference(x.float(), lists, exact)
    assert_close(expand_grouped(x, lists, experts, tile), middle)
    parts = contract_grouped_reference(middle, lists, exact)
    assert_close(contract_grouped(middle.to(dtype), lists, experts, tile), parts)
    assert_close(combine(parts.to(dtype), residual), combine_reference(parts, residual.float()))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([16, 32, 128]))
def test_grid_covers_every_possible_tile(counts: list[int], tile: int) -> None:
    needed = sum(-(-count // tile) for count in counts)
    assert needed <= max_tiles(sum(counts), len(counts), tile)


@pytest.mark.parametrize("num_pairs", [1, 72, 512, 2048, 16_384, 131_072])
@pytest.mark.parametrize("num_experts", [2, 128, 512])
@pytest.mark.parametrize("num_matrices", [1, 2])
def test_tiles_fit_the_smallest_device_with_three_stages(num_pairs: int, num_experts: int, num_matrices: int) -> None:
    tile = tiling(num_pairs, num_experts)
    inputs, stages = tile.fitted(num_matrices, 2, SMALLEST)
    assert stages >= 3
    assert (stages - 1) * inputs * (num_matrices * tile.outputs + tile.pairs) * 2 <= SMALLEST.num_bytes
