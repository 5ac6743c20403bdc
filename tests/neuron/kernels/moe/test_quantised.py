"""Mixtures with quantised experts give what the same experts in dense form give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.moe.test_mixture import with_biases

from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.expert_pairs import ExpertChoice
from cortex.neuron.kernels.float8.layout import FLOAT8_BLOCKS, FLOAT8_ROWS
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.float8.support import has_float8_products
from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.mixture import mixture, mixture_grouped, mixture_of_rows, mixture_reference
from cortex.neuron.kernels.quantised import experts as packed_experts
from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised.experts import PackedExpertTiles
from cortex.neuron.kernels.quantised.matrix import PackedMatrix
from cortex.neuron.kernels.storages import empty_device_matrix

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KIND = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU or TRITON_INTERPRET=1"
)
EPS = 1e-6
Mixture = Callable[..., torch.Tensor]


def random_matrix(layout: DeviceLayout, outputs: int, inputs: int) -> ExpertMatrix:
    matrix = empty_device_matrix(layout, outputs, inputs, DEVICE)
    if isinstance(matrix, PackedMatrix):
        bits, group, codebook = matrix.codes.layout.bits, matrix.codes.layout.group, matrix.codes.layout.codebook
        zero = 1 << bits - 1 if matrix.codes.layout.zero is None else matrix.codes.layout.zero
        code = torch.randint(0, 1 << bits, (outputs, inputs), device=DEVICE)
        if codebook:
            code = torch.tensor(codebook, device=DEVICE)[code] + zero
        scale = torch.rand(outputs, inputs // group, device=DEVICE) * (2 * inputs**-0.5 / zero)
        matrix.put_codes(0, code.to(torch.uint8), scale, scale * -zero)
    else:
        matrix.put_values(0, torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5)
    return matrix


def random_experts(
    gate_up: DeviceLayout, down: DeviceLayout, hidden: int, inner: int, *, gated: bool = True
) -> Experts:
    experts = 4
    return Experts(
        torch.randn(experts, hidden, device=DEVICE).to(KIND),
        random_matrix(gate_up, experts * (1 + gated) * inner, hidden),
        random_matrix(down, experts * hidden, inner),
        top_k=2,
        renormalise=True,
        gated=gated,
    )


def dense(experts: Experts) -> Experts:
    """The same experts as dense weights."""
    gate_up, down = (DenseMatrix(matrix.values().to(KIND)) for matrix in (experts.gate_up, experts.down))
    return replace(experts, gate_up=gate_up, down=down)


GROUPED = ((mixture_grouped, 9),)
ONE_ROW = ((mixture_of_rows, 1), *GROUPED)
BOTH = ((mixture_of_rows, 2), (mixture_grouped, 2), *GROUPED)
"""For one layout of each kernel: which row belongs to a pair, and which expert has none, does not depend on it."""


@needs_kernels
@pytest.mark.parametrize(
    ("gate_up", "down", "hidden", "inner", "runs"),
    [
        (layouts.Q4, layouts.Q6, 160, 32, BOTH),
        (layouts.Q8, layouts.Q4, 160, 32, ONE_ROW),
        (layouts.IQ4, layouts.IQ4, 160, 32, ONE_ROW),
        (layouts.INT4, layouts.INT4, 160, 32, BOTH),
        (FLOAT8_BLOCKS, FLOAT8_BLOCKS, 128, 128, BOTH),
        (FLOAT8_ROWS, FLOAT8_ROWS, 128, 128, ONE_ROW),
        (FLOAT8_ROWS, layouts.Q8, 128, 32, GROUPED),
    ],
)
def test_mixture_agrees_with_dense_experts(
    gate_up: DeviceLayout, down: DeviceLayout, hidden: int, inner: int, runs: Sequence[tuple[Mixture, int]]
) -> None:
    torch.manual_seed(0)
    experts = random_experts(gate_up, down, hidden, inner)
    norm_weight = torch.rand(hidden, device=DEVICE).to(KIND) + 0.5
    is_rounded = isinstance(experts.gate_up, Float8Matrix) and has_float8_products(DEVICE)
    for function, rows in runs:
        x = torch.randn(rows, hidden, device=DEVICE).to(KIND)
        expected = mixture_reference(x, norm_weight, EPS, dense(experts))
        tolerance = 0.15 if is_rounded and function is mixture_grouped else 0.03
        torch.testing.assert_close(function(x, norm_weight, EPS, experts), expected, rtol=0.02, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "slots", "inner"),
    [
        (layouts.Q4, 3, 512),  # chunks beyond the last slot
        (layouts.Q4, 3, 160),  # a chunk of each slot is not full
        (layouts.Q6, 2, 704),
        (layouts.Q2, 2, 128),
        (layouts.Q3, 2, 128),
        (layouts.Q5, 3, 256),
        (layouts.Q8, 3, 256),
        (layouts.INT8, 2, 256),
        (layouts.FP4, 2, 288),
        (layouts.Q4, 5, 1664),  # more than a program takes at once
    ],
)
def test_contracted_rows_agree_with_dense_experts(layout: DeviceLayout, slots: int, inner: int) -> None:
    torch.manual_seed(0)
    rows, experts, hidden = 3, 5, 36
    matrix = random_matrix(layout, experts * hidden, inner)
    chosen = torch.stack([torch.randperm(experts, device=DEVICE)[:slots] for _ in range(rows)]).to(torch.int32)
    weights = torch.rand(rows, slots, device=DEVICE)
    residual = torch.randn(rows, hidden, device=DEVICE)
    bias = torch.randn(experts * hidden, device=DEVICE)
    x = torch.randn(rows * slots, inner, device=DEVICE)
    down = matrix.values().unflatten(0, (experts, hidden))[chosen.long()]  # [rows, slots, hidden, inner]
    for kind, has_bias in ((KIND, slots == 3), (torch.bfloat16, slots != 3)):
        own_bias = bias.to(kind) if has_bias else None
        out = matrix.contract_rows(x.to(kind), ExpertChoice(chosen, weights), residual.to(kind), own_bias)
        parts = torch.einsum("rshi,rsi->rsh", down, x.to(kind).float().unflatten(0, (rows, slots)))
        if own_bias is not None:
            parts += own_bias.float().unflatten(0, (experts, hidden))[chosen.long()]
        expected = residual.to(kind).float() + (parts * weights[..., None]).sum(1)
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.03)


@needs_kernels
@pytest.mark.parametrize("layout", [layouts.Q4, FLOAT8_ROWS])
def test_experts_without_gates_agree_with_dense_ones(layout: DeviceLayout) -> None:
    torch.manual_seed(0)
    experts = random_experts(layout, layout, 128, 128, gated=False)
    norm_weight = torch.rand(128, device=DEVICE).to(KIND) + 0.5
    is_rounded = isinstance(experts.gate_up, Float8Matrix) and has_float8_products(DEVICE)
    for rows in (1, 9):
        x = torch.randn(rows, 128, device=DEVICE).to(KIND)
        expected = mixture_reference(x, norm_weight, EPS, dense(experts))
        tolerance = 0.3 if is_rounded and rows > 1 else 0.05  # a square doubles what rounding costs
        torch.testing.assert_close(mixture(x, norm_weight, EPS, experts), expected, rtol=0.02, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "hidden", "inner"), [(layouts.FP4, 160, 32), (layouts.Q6, 160, 32), (FLOAT8_ROWS, 128, 128)]
)
def test_mixture_with_biases_agrees_with_dense_experts(layout: DeviceLayout, hidden: int, inner: int) -> None:
    torch.manual_seed(0)
    experts = with_biases(random_experts(layout, layout, hidden, inner))
    norm_weight = torch.rand(hidden, device=DEVICE).to(KIND) + 0.5
    is_rounded = isinstance(experts.gate_up, Float8Matrix) and has_float8_products(DEVICE)
    for function, rows in ONE_ROW:
        x = torch.randn(rows, hidden, device=DEVICE).to(KIND)
        expected = mixture_reference(x, norm_weight, EPS, dense(experts))
        tolerance = 0.3 if is_rounded and function is mixture_grouped else 0.06
        torch.testing.assert_close(function(x, norm_weight, EPS, experts), expected, rtol=0.02, atol=tolerance)


@needs_kernels
def test_programs_take_blocks_of_rows_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_blocks(*args: int, **_: object) -> PackedExpertTiles:
        chunks = args[3]
        return PackedExpertTiles(pairs=16, blocks=2, chunks=2 if chunks % 2 == 0 else 1, stages=3)

    monkeypatch.setattr(packed_experts, "packed_expert_tiles", two_blocks)
    torch.manual_seed(0)
    experts = random_experts(layouts.Q4, layouts.Q4, 192, 32)
    x, norm_weight = torch.randn(3, 192, device=DEVICE).to(KIND), torch.ones(192, device=DEVICE).to(KIND)
    expected = mixture_reference(x, norm_weight, EPS, dense(experts))
    torch.testing.assert_close(mixture_grouped(x, norm_weight, EPS, experts), expected, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("layout", [layouts.Q5, FLOAT8_BLOCKS])
def test_a_cpu_without_kernels_computes_with_dense_weights(layout: DeviceLayout) -> None:
    if DEVICE.type == "cuda" or INTERPRETED:
        pytest.skip("kernels run here")
    experts = random_experts(layout, layout, 128, 128)
    x, norm_weight = torch.randn(2, 128), torch.rand(128)
    torch.testing.assert_close(
        mixture(x, norm_weight, EPS, experts), mixture_reference(x, norm_weight, EPS, dense(experts))
    )
