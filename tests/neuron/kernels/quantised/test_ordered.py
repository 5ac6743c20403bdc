"""Matrices whose columns are sorted by group: what is packed comes back, and products agree with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.neuron.kernels.conftest import combinations, relative_error
from torch import Tensor

from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, Prologue
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.mixture import MAX_SINGLE_ROWS, mixture_grouped, mixture_of_rows, mixture_reference
from cortex.neuron.kernels.quantised.layout import INT4, INT8, Layout
from cortex.neuron.kernels.quantised.matrix import (
    OrderedMatrix,
    PackedMatrix,
    in_order,
    in_order_reference,
    lists_in_order,
)

OUTPUTS, INPUTS = 72, 160
ROWS = (1, 7, 70) if INTERPRETED else (1, 7, 64, 300)
_LAYOUTS = (INT4, INT8)
_PARTS = ("nothing", "norm", "bias and residual", "activation")


def random_matrix(layout: Layout, inputs: int, device: torch.device) -> tuple[OrderedMatrix, PackedMatrix, Tensor]:
    """The matrix, the same without an order, and its order."""
    code = torch.randint(0, 1 << layout.bits, (OUTPUTS, inputs), dtype=torch.uint8, device=device)
    scale = (torch.rand(OUTPUTS, inputs // 32, device=device) / (1 << layout.bits)).half().float()
    minimum = -torch.randint(0, 1 << layout.bits, scale.shape, device=device) * scale
    order = torch.randperm(inputs, device=device)
    ordered = OrderedMatrix(layout, OUTPUTS, inputs, device)
    ordered.put_order(0, order)
    ordered.put_codes(0, code, scale, minimum)
    plain = PackedMatrix(layout, OUTPUTS, inputs, device)
    plain.put_codes(0, code, scale, minimum)
    return ordered, plain, order


@pytest.mark.parametrize("layout", _LAYOUTS, ids=["4 bits", "8 bits"])
def test_values_have_the_columns_of_the_inputs(layout: Layout, device: torch.device) -> None:
    ordered, plain, order = random_matrix(layout, INPUTS, device)
    assert torch.equal(ordered.values()[:, order], plain.values())
    ids = torch.tensor([3, 71, 3], device=device)
    assert torch.equal(ordered.rows(ids, torch.float32)[:, order], plain.rows(ids, torch.float32))
    ordered.put_values(0, ordered.values())
    torch.testing.assert_close(ordered.values()[:, order], plain.values(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("rows", "layout", "part"), combinations(ROWS, _LAYOUTS, _PARTS, one_of=3))
def test_product_is_that_of_the_inputs_in_order(
    rows: int, layout: Layout, part: str, device: torch.device, dtype: torch.dtype
) -> None:
    ordered, plain, order = random_matrix(layout, INPUTS, device)
    x = torch.randn(rows, INPUTS, device=device).to(dtype)
    weight = torch.rand(INPUTS, device=device).to(dtype)
    bias = torch.randn(OUTPUTS, device=device).to(dtype)
    residual = torch.randn(rows, OUTPUTS, device=device).to(dtype)
    prologue = Prologue(weight, 1e-6) if part == "norm" else PLAIN
    epilogue = Epilogue(activation="silu") if part == "activation" else Epilogue()
    expected = plain.product(x[:, order], prologue._replace(norm=weight[order]) if part == "norm" else PLAIN, epilogue)
    if part == "bias and residual":
        epilogue, expected = Epilogue(bias, residual.clone()), expected + bias + residual
    out = ordered.product(x, prologue, epilogue)
    assert relative_error(out, expected) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    if part == "nothing":
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("rows", "size"), [(1, 160), (5, 1184), (3, 4096), (2, 65536)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_inputs_in_order_agree_with_the_reference(
    rows: int, size: int, has_norm: bool, device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(rows, size + 8, device=device).to(dtype)[:, :size]
    matrix = OrderedMatrix(INT4, 1, size, device)
    matrix.put_order(0, torch.randperm(size, device=device))
    prologue = Prologue(torch.rand(size, device=device).to(dtype), 1e-5) if has_norm else PLAIN
    expected = in_order_reference(x, matrix.order, prologue)
    out = in_order(x, matrix.order, prologue)
    assert relative_error(out, expected) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert has_norm or torch.equal(out, expected)


EXPERTS, HIDDEN, INNER, TOP_K = 5, 160, 32, 2


def random_experts(layout: Layout, device: torch.device, dtype: torch.dtype, **options: Any) -> Experts:
    """The last has its columns in the order of the inputs."""
    gated, shared = options.get("gated", True), options.get("num_shared", 0)
    rows = (1 + gated) * INNER
    gate_up = OrderedMatrix(layout, EXPERTS * rows, HIDDEN, device, EXPERTS)
    down = PackedMatrix(layout, EXPERTS * HIDDEN, INNER, device)
    for expert in range(EXPERTS - 1):
        gate_up.put_order(expert * rows + rows // 2, torch.randperm(HIDDEN, device=device))
    for matrix in (gate_up, down):
        code = torch.randint(0, 1 << layout.bits, (matrix.outputs, matrix.inputs), dtype=torch.uint8, device=device)
        scale = torch.rand(matrix.outputs, matrix.inputs // 32, device=device).half().float() / (1 << layout.bits - 2)
        matrix.put_codes(0, code, scale, -(1 << layout.bits - 1) * scale)
    routed = options.pop("routed", EXPERTS - shared)
    router = torch.randn(routed + shared, HIDDEN, device=device).to(dtype)
    return Experts(router, gate_up, down, TOP_K, renormalise=True, **options)


@pytest.mark.parametrize("layout", _LAYOUTS, ids=["4 bits", "8 bits"])
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {}),
        (2, {"gated": False}),
        (7, {"num_shared": 1}),
        (7, {"routed": 9, "first": 2}),  # of a rank that has some of the experts
        (40, {}),
    ],
)
def test_experts_take_their_inputs_in_their_own_orders(
    rows: int, options: dict[str, Any], layout: Layout, device: torch.device, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    experts = random_experts(layout, device, dtype, **options)
    dense = replace(experts, gate_up=DenseMatrix(experts.gate_up.values().to(dtype)))
    x, weight = torch.randn(rows, HIDDEN, device=device).to(dtype), torch.rand(HIDDEN, device=device).to(dtype) + 0.5
    expected = mixture_reference(x, weight, 1e-6, dense)
    assert relative_error(mixture_reference(x, weight, 1e-6, experts), expected) < 1e-6
    for function in (mixture_of_rows, mixture_grouped) if rows <= MAX_SINGLE_ROWS else (mixture_grouped,):
        out = function(x, weight, 1e-6, experts)
        assert relative_error(out, expected) < 0.02, function  # codes are multiplied in half precision


@pytest.mark.parametrize("size", [160, 16500])
def test_pairs_in_order_agree_with_the_reference(size: int, device: torch.device, dtype: torch.dtype) -> None:
    rows, slots = 6, 3
    matrix = OrderedMatrix(INT4, EXPERTS, size, device, EXPERTS)
    for expert in range(EXPERTS):
        matrix.put_order(expert, torch.randperm(size, device=device))
    x = torch.randn(rows, size + 8, device=device).to(dtype)[:, :size]
    chosen = torch.stack([torch.randperm(EXPERTS, device=device)[:slots] for _ in range(rows)]).int()
    expected = in_order_reference(x, matrix.order, PLAIN, chosen)
    assert torch.equal(in_order(x, matrix.order, PLAIN, chosen), expected)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).int()
    members = torch.zeros(EXPERTS, rows, dtype=torch.int32, device=device)
    for expert in range(EXPERTS):
        (pairs,) = (chosen.flatten() == expert).nonzero(as_tuple=True)
        members[expert, : len(pairs)] = pairs
    lists = PairLists(torch.ones(rows, slots, device=device), counts, members)
    assert torch.equal(lists_in_order(x, matrix.order, lists, slots), expected)
    norm = Prologue(torch.rand(size, device=device).to(dtype), 1e-5)
    expected = in_order_reference(x, matrix.order, norm, chosen)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert relative_error(in_order(x, matrix.order, norm, chosen), expected) < tolerance
