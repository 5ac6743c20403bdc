import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.activations import ACTIVATIONS
from cortex.neuron.kernels.dense.experts import dense_grouped_product, grouped_reference
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.routing import list_pairs_reference
from cortex.neuron.kernels.products.grouped import (
    Tiling,
    combine,
    combine_reference,
    expert_load,
    max_tiles,
    tiling,
)
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

    gate_up = random((routed + shared) * 2 * inner, hidden) * hidden**-0.5
    down = random((routed + shared) * hidden, inner) * inner**-0.5
    x, residual = random(tokens, hidden), random(tokens, hidden)
    logits = random(tokens, routed + bool(shared)).float()
    logits[:, 2] += bias
    experts = Experts(logits.t(), DenseMatrix(gate_up), DenseMatrix(down), 2, True, shared)
    lists = list_pairs_reference(logits, experts)
    slots = experts.slots

    middle = torch.empty(tokens * slots, inner, device=device)
    parts = torch.empty(tokens * slots, hidden, device=device)
    for activation in ACTIVATIONS:
        grouped_reference(x.float(), gate_up.float(), lists, middle, pairs_per_row=slots, activation=activation)
        out = torch.full_like(middle, torch.nan, dtype=dtype)
        dense_grouped_product(x, gate_up, lists, out, tile, pairs_per_row=slots, activation=activation)
        assert_close(out, middle)
    grouped_reference(middle, down.float(), lists, parts, pairs_per_row=1, activation=None)
    out = torch.full_like(parts, torch.nan, dtype=dtype)
    dense_grouped_product(middle.to(dtype), down, lists, out, tile, pairs_per_row=1, activation=None)
    assert_close(out, parts)
    assert_close(combine(parts.to(dtype), residual), combine_reference(parts, residual.float()))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([16, 32, 128]))
def test_grid_covers_every_possible_tile(counts: list[int], tile: int) -> None:
    needed = sum(-(-count // tile) for count in counts)
    assert needed <= max_tiles(sum(counts), len(counts), tile)


@pytest.mark.parametrize("num_pairs", [1, 72, 512, 2048, 16_384, 131_072])
@pytest.mark.parametrize("num_experts", [2, 128, 512])
@pytest.mark.parametrize("num_matrices", [1, 2])
def test_tiles_fit_the_smallest_device_with_three_stages(num_pairs: int, num_experts: int, num_matrices: int) -> None:
    tile = tiling(expert_load(num_pairs, num_experts))
    inputs, stages = tile.fitted(num_matrices, 2, SMALLEST)
    assert stages >= 3
    assert (stages - 1) * inputs * (num_matrices * tile.outputs + tile.pairs) * 2 <= SMALLEST.num_bytes
