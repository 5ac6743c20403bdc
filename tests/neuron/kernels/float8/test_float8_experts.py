"""Products of pairs with eight-bit floating-point experts, with rows of eight bits and with others."""

from __future__ import annotations

import pytest
import torch

from cortex.neuron.kernels.activations import activate_reference
from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.float8.codes import empty_float8_codes, widened
from cortex.neuron.kernels.float8.experts import float8_grouped_product
from cortex.neuron.kernels.float8.layout import FLOAT8_BLOCKS, FLOAT8_ROWS, Float8Layout
from cortex.neuron.kernels.float8.rows import float8_rows
from cortex.neuron.kernels.float8.support import has_float8_products
from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.products.grouped import expert_load, tiling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KIND = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter multiplies no bfloat16
EXPERTS, SLOTS, HELD = 3, 2, 2
"""The last expert is held by another rank."""

pytestmark = pytest.mark.skipif(not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU or TRITON_INTERPRET=1")


def some_lists(tokens: int) -> tuple[PairLists, torch.Tensor]:
    """Pairs of tokens that choose experts at random, and the expert of each pair."""
    chosen = torch.stack([torch.randperm(EXPERTS)[:SLOTS] for _ in range(tokens)]).flatten()
    counts = torch.zeros(HELD, dtype=torch.int32)
    members = torch.full((HELD, tokens), 1 << 20, dtype=torch.int32)
    for expert in range(HELD):
        pairs = (chosen == expert).nonzero()[:, 0]
        counts[expert] = len(pairs)
        members[expert, : len(pairs)] = pairs
    weights = torch.rand(tokens, SLOTS, device=DEVICE)
    return PairLists(weights, counts.to(DEVICE), members.to(DEVICE)), chosen


@pytest.mark.parametrize("layout", [FLOAT8_BLOCKS, FLOAT8_ROWS], ids=["blocks", "rows"])
@pytest.mark.parametrize("is_rounded", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(9, 128, 384), (70, 256, 128)])
def test_pairs_agree_with_the_widened_matrix_of_their_expert(
    layout: Float8Layout, is_rounded: bool, gated: bool, tokens: int, outputs: int, inputs: int
) -> None:
    if DEVICE.type == "cuda" and is_rounded and not has_float8_products(DEVICE):
        pytest.skip("needs a GPU with FP8 tensor cores")
    torch.manual_seed(0)
    lists, chosen = some_lists(tokens)
    matrix = empty_float8_codes(layout, HELD * outputs * (1 + gated), inputs, DEVICE)
    matrix.put_values(0, torch.randn(matrix.outputs, inputs, device=DEVICE) * inputs**-0.5)
    matrix.scales.mul_(torch.logspace(-1, 0.5, matrix.scales.numel(), device=DEVICE).view_as(matrix.scales))
    pairs_per_row = SLOTS if gated else 1
    x = torch.randn(tokens * SLOTS // pairs_per_row, inputs, device=DEVICE).to(KIND)
    rows = float8_rows(x, grouped=False) if is_rounded else None
    values = x.float() if rows is None else rows.codes.float() * rows.scales.t()
    out = torch.zeros(tokens * SLOTS, outputs, dtype=KIND, device=DEVICE)
    float8_grouped_product(
        x if rows is None else rows.codes,
        None if rows is None else rows.scales,
        matrix,
        lists,
        out,
        tiling(expert_load(len(out), HELD)),
        pairs_per_row=pairs_per_row,
        activation="silu" if gated else None,
    )
    weights = widened(matrix).view(HELD, -1, inputs)
    for pair, expert in enumerate(chosen.tolist()):
        if expert >= HELD:
            assert not out[pair].any()
            continue
        expected = weights[expert] @ values[pair // pairs_per_row]
        expected = activate_reference(expected, "silu") if gated else expected * lists.weights.view(-1)[pair]
        assert (out[pair].float() - expected).norm() <= 0.01 * expected.norm() + 1e-6
