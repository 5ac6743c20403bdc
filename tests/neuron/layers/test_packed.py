"""Layers over packed weights give the same output as layers over the same weights in dense form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.matrix import StackedMatrix
from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.matrix import PackedMatrix
from cortex.neuron.layers.configs import NormConfig
from cortex.neuron.layers.embedding import Embedding, Head
from cortex.neuron.layers.linear import GatedLinear, Linear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters

CPU = torch.device("cpu")
INPUTS = 160


def parameters_for(layouts_by_name: Mapping[str, Layout]) -> Parameters:
    return Parameters(CPU, torch.float32, packing=layouts_by_name)


def fill(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Fills all weights at random. Returns the packed weights by name, dequantised."""
    torch.manual_seed(0)
    dense: dict[str, torch.Tensor] = {}
    for binding in parameters.bindings:
        binding.destination.normal_()
    for packed in parameters.packed_bindings:
        rows = slice(packed.first_row, packed.first_row + packed.num_rows)
        packed.matrix.put_values(packed.first_row, torch.randn(packed.num_rows, packed.matrix.inputs))
        dense[packed.source] = packed.matrix.values(rows)
    return dense


def test_projections_of_mixed_formats_equal_the_dense_product() -> None:
    parameters = parameters_for({"q.weight": layouts.Q4, "k.weight": layouts.Q4, "v.weight": layouts.Q6})
    norm = RMSNorm(parameters, INPUTS, NormConfig(1e-6), "norm.weight")
    linear = Linear(parameters, INPUTS, {"q": 48, "k": 16, "v": 16}, bias=True)
    dense = fill(parameters)
    assert isinstance(linear.matrix, StackedMatrix)
    assert [matrix.outputs for matrix in linear.matrix.parts] == [64, 16]
    x, residual = torch.randn(3, INPUTS), torch.randn(3, 80)
    weight = torch.cat([dense[f"{name}.weight"] for name in "qkv"])
    expected = torch.nn.functional.linear(norm(x), weight, linear.bias) + residual
    torch.testing.assert_close(linear(x, norm=norm, residual=residual.clone()), expected, rtol=1e-4, atol=1e-4)


def test_one_unpacked_projection_makes_all_of_them_dense() -> None:
    linear = Linear(parameters_for({"q.weight": layouts.Q4}), INPUTS, {"q": 48, "k": 16})
    assert isinstance(linear.matrix, DenseMatrix)
    assert linear.matrix.weight.shape == (64, INPUTS)


def test_gated_projections_equal_the_dense_product() -> None:
    parameters = parameters_for({"gate.weight": layouts.Q5, "up.weight": layouts.Q8})
    norm = RMSNorm(parameters, INPUTS, NormConfig(1e-6), "norm.weight")
    gated = GatedLinear(parameters, INPUTS, 32, "gate", "up")
    dense = fill(parameters)
    x = torch.randn(2, INPUTS)
    gate, up = (torch.nn.functional.linear(norm(x), dense[f"{name}.weight"]) for name in ("gate", "up"))
    torch.testing.assert_close(gated(x, norm=norm), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-3)


def test_tied_head_multiplies_with_the_packed_embedding() -> None:
    parameters = parameters_for({"embed.weight": layouts.Q8})
    norm = RMSNorm(parameters, INPUTS, NormConfig(1e-6), "norm.weight")
    embedding = Embedding(parameters, 40, INPUTS, "embed.weight")
    head = Head(parameters, 40, INPUTS, "lm_head", embedding.matrix)
    weight = fill(parameters)["embed.weight"]
    tokens = torch.tensor([3, 39, 3])
    torch.testing.assert_close(embedding(tokens), weight[tokens], rtol=0, atol=0)
    hidden = torch.randn(2, INPUTS)
    torch.testing.assert_close(head.logits(hidden, norm), norm(hidden) @ weight.t(), rtol=1e-4, atol=1e-3)
    assert parameters.num_bytes == layouts.Q8.num_bytes(40, INPUTS) + INPUTS * 4


def test_storages_hold_packed_weights_once() -> None:
    parameters = parameters_for({"q.weight": layouts.Q6, "k.weight": layouts.Q6})
    Linear(parameters, INPUTS, {"q": 32, "k": 16})
    total = sum(storage.nbytes() for storage in parameters.storages())
    assert total == layouts.Q6.num_bytes(48, INPUTS)


def formats() -> Iterator[tuple[Layout, float]]:
    """Each layout and the relative error that its bits allow for normally distributed weights."""
    yield from zip(
        (layouts.Q2, layouts.Q3, layouts.Q4, layouts.Q5, layouts.Q6, layouts.Q8),
        (0.35, 0.22, 0.09, 0.045, 0.025, 0.007),
        strict=True,
    )


@pytest.mark.parametrize(("layout", "bound"), list(formats()), ids=lambda value: f"{getattr(value, 'bits', value)}")
def test_quantisation_error_stays_within_the_bound_of_the_bits(layout: Layout, bound: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 256)
    values[0] = 0.0
    values[1] = 0.25
    matrix = PackedMatrix(layout, 64, 256, CPU)
    matrix.put_values(0, values)
    error = (matrix.values() - values).norm() / values.norm()
    assert bound / 4 < error < bound
    assert not matrix.values()[0].any()
    assert matrix.values().isfinite().all()
