import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.neuron.kernels.conftest import AssertClose, combinations

from cortex.neuron.kernels.activations import ACTIVATIONS
from cortex.neuron.kernels.dense.experts import dense_grouped_product, grouped_reference, row_blocks
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.dense.wide_experts import takes_wide_tiles, wide_grouped_product
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
from cortex.neuron.kernels.shared_memory import SMALLEST, SharedMemory

TILES = [Tiling(16, 16, 16, 4), Tiling(32, 64, 32, 4)]


@pytest.mark.parametrize(
    ("tile", "shape", "load"),
    combinations(TILES, [(64, 32, 6, 0), (40, 25, 7, 1), (192, 8, 20, 0)], [(5, 0.0), (41, 0.0), (41, 9.0)], one_of=2),
)
def test_products_and_sum_match_their_references(
    tile: Tiling,
    shape: tuple[int, int, int, int],
    load: tuple[int, float],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    """`load`: tokens, and a bias that routes all of them to the same expert, which then has several tiles while others
    have none. With the last shape a program takes several blocks of the second product's rows."""
    (hidden, inner, routed, shared), (tokens, bias) = shape, load

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


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("is_biased", [True, False])
def test_wide_tiles_match_the_reference(
    activation: str | None, is_biased: bool, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    """One expert has all of 250 tokens, in two tiles, one with a tail, and three have fewer pairs than a tile."""
    tokens, routed, outputs, inputs = 250, 4, 128, 64
    logits = torch.randn(tokens, routed, device=device)
    logits[:, 1] += 99
    rows = outputs * (1 if activation is None else 2)
    weight = torch.randn(routed * rows, inputs, device=device, dtype=dtype) * inputs**-0.5
    bias = torch.randn(routed * rows, device=device, dtype=dtype) if is_biased else None
    lists = list_pairs_reference(logits, Experts(logits.t(), DenseMatrix(weight), DenseMatrix(weight), 2, True))
    x = torch.randn(tokens, inputs, device=device, dtype=dtype)
    out, expected = (torch.full((tokens * 2, outputs), torch.nan, device=device, dtype=kind) for kind in (dtype, None))
    wide_grouped_product(x, weight, lists, out, pairs_per_row=2, activation=activation, bias=bias)
    exact = None if bias is None else bias.float()
    grouped_reference(x.float(), weight.float(), lists, expected, pairs_per_row=2, activation=activation, bias=exact)
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("load", "inputs", "outputs", "copies", "is_wide"),
    [
        (198, 2048, 512, 2, True),
        (128, 2048, 512, 2, False),  # an expert's pairs fit into one tile of the other kernel
        (198, 2000, 512, 2, False),
        (198, 2048, 500, 2, False),
        (198, 2048, 512, 1, False),  # products are synchronous
    ],
)
def test_wide_tiles_are_for_many_pairs_of_whole_blocks(
    load: int, inputs: int, outputs: int, copies: int, is_wide: bool
) -> None:
    assert takes_wide_tiles(load, inputs, outputs, 2, SharedMemory(227 << 10, copies)) == is_wide
    assert not takes_wide_tiles(load, inputs, outputs, 2, SharedMemory(163 << 10, copies))


@pytest.mark.parametrize(
    ("steps", "outputs", "block_out", "busy", "blocks"),
    [
        (4, 2048, 64, 368, 8),  # the second product of 64 rows and small experts
        (8, 2048, 128, 513, 4),  # ... of a prompt
        (32, 512, 128, 513, 1),  # the first product has enough steps
        (8, 1920, 128, 513, 1),  # blocks that do not divide the rows
        (4, 2048, 64, 20, 1),  # too few programs for the device
    ],
)
def test_a_program_takes_several_blocks_of_short_rows(
    steps: int, outputs: int, block_out: int, busy: int, blocks: int
) -> None:
    assert row_blocks(steps, outputs, block_out, busy, processors=132) == blocks


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
