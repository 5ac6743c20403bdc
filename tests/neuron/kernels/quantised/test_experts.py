"""Mixtures with packed experts give what the same experts in dense form give."""

from __future__ import annotations

import pytest
import torch

from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.moe.mixture import mixture, mixture_grouped, mixture_of_rows, mixture_reference
from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised.experts import PackedExperts
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.packing import PackedMatrix, empty_matrix

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KIND = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU or TRITON_INTERPRET=1"
)
EPS = 1e-6


def random_matrix(layout: Layout, outputs: int, inputs: int) -> PackedMatrix:
    matrix = empty_matrix(layout, outputs, inputs, DEVICE)
    if layout.levels:
        levels = torch.tensor(layout.levels, device=DEVICE)
        level = levels[torch.randint(0, 16, (outputs, inputs), device=DEVICE)]
        scale = torch.rand(outputs, inputs // layout.group, device=DEVICE) * (inputs**-0.5 / 64)
        matrix.put(0, (level + (layout.zero or 0)).to(torch.uint8), scale, scale * -(layout.zero or 0))
    else:
        matrix.put_numbers(0, torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5)
    return matrix


def random_experts(gate_up: Layout, down: Layout, hidden: int, inner: int) -> PackedExperts:
    experts = 4
    return PackedExperts(
        torch.randn(experts, hidden, device=DEVICE).to(KIND),
        random_matrix(gate_up, experts * 2 * inner, hidden),
        random_matrix(down, experts * hidden, inner),
        top_k=2,
        renormalise=True,
    )


@needs_kernels
@pytest.mark.parametrize(
    ("gate_up", "down"), [(layouts.Q4, layouts.Q6), (layouts.Q8, layouts.Q4), (layouts.IQ4, layouts.IQ4)]
)
@pytest.mark.parametrize("rows", [2, 9])
def test_mixture_agrees_with_dense_experts(gate_up: Layout, down: Layout, rows: int) -> None:
    torch.manual_seed(0)
    hidden, inner = 160, 32
    experts = random_experts(gate_up, down, hidden, inner)
    x = torch.randn(rows, hidden, device=DEVICE).to(KIND)
    norm_weight = torch.rand(hidden, device=DEVICE).to(KIND) + 0.5
    expected = mixture_reference(x, norm_weight, EPS, experts.dense())
    for function in (mixture_of_rows, mixture_grouped) if rows < 9 else (mixture_grouped,):
        torch.testing.assert_close(function(x, norm_weight, EPS, experts), expected, rtol=0.02, atol=0.03)


def test_a_cpu_without_kernels_computes_with_dense_weights() -> None:
    if DEVICE.type == "cuda" or INTERPRETED:
        pytest.skip("kernels run here")
    experts = random_experts(layouts.Q5, layouts.Q5, 128, 64)
    x, norm_weight = torch.randn(2, 128), torch.rand(128)
    torch.testing.assert_close(
        mixture(x, norm_weight, EPS, experts), mixture_reference(x, norm_weight, EPS, experts.dense())
    )
