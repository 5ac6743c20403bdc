"""The layer against the blocks of the reference library, for every form in which checkpoints store the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from cortex.neuron.kernels.quantised.layout import Q4, Q8, Layout
from cortex.neuron.layers.configs import MoEConfig, NormConfig
from cortex.neuron.layers.moe import MoE
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOP_K = 40, 24, 6, 3
PARTS = ("gate", "up", "down")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=[24, 48, 40, 10], ids="shared {}".format)
def block(request: pytest.FixtureRequest) -> Qwen3NextSparseMoeBlock:
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        shared_expert_intermediate_size=request.param,
    )
    block = Qwen3NextSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return block


def layer_like(block: Qwen3NextSparseMoeBlock, device: torch.device = CPU) -> tuple[MoE, RMSNorm, Parameters]:
    shared = block.shared_expert.down_proj.weight.shape[1]
    parameters = Parameters(device, torch.float32)
    layer = MoE(parameters, MoEConfig(HIDDEN, INNER, EXPERTS, TOP_K, True, shared), "mlp")
    return layer, RMSNorm(parameters, HIDDEN, NormConfig(1e-6), "norm"), parameters


def stacked(block: Qwen3NextSparseMoeBlock) -> Tensors:
    """The tensors of a checkpoint that stores all experts stacked."""
    return {"norm": torch.rand(HIDDEN), **{f"mlp.{name}": tensor for name, tensor in block.state_dict().items()}}


def separate(block: Qwen3NextSparseMoeBlock) -> Tensors:
    """The tensors of a checkpoint that stores the matrices of each expert separately."""
    tensors = stacked(block)
    gate_up, down = tensors.pop("mlp.experts.gate_up_proj"), tensors.pop("mlp.experts.down_proj")
    for expert in range(EXPERTS):
        gate, up = gate_up[expert].chunk(2)
        for name, matrix in (("gate", gate), ("up", up), ("down", down[expert])):
            tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = matrix
    return tensors


def fill(parameters: Parameters, tensors: Tensors) -> None:
    for binding in parameters.bindings_from(tensors):
        tensor = tensors[binding.source]
        binding.destination.copy_(binding.transform(tensor) if binding.transform else tensor)


@pytest.mark.parametrize("stored", [stacked, separate])
@pytest.mark.parametrize("tokens", [1, 2, 50])
@torch.inference_mode()
def test_output_matches_the_reference_block_for_every_storage_form(
    stored: Callable[[Qwen3NextSparseMoeBlock], Tensors], tokens: int, block: Qwen3NextSparseMoeBlock
) -> None:
    layer, norm, parameters = layer_like(block)
    fill(parameters, stored(block))
    hidden = torch.randn(tokens, HIDDEN)
    expected = hidden + block(norm(hidden)[None])[0]
    torch.testing.assert_close(layer(hidden, norm, hidden), expected, atol=1e-5, rtol=1e-5)


def test_bindings_use_every_tensor_of_a_checkpoint_and_no_other(block: Qwen3NextSparseMoeBlock) -> None:
    _, _, parameters = layer_like(block)
    for tensors in (stacked(block), separate(block)):
        assert {binding.source for binding in parameters.bindings_from(tensors)} == set(tensors)


def test_meta_device_gives_the_same_size(block: Qwen3NextSparseMoeBlock) -> None:
    _, _, sized = layer_like(block, torch.device("meta"))
    _, _, parameters = layer_like(block)
    assert sized.num_bytes == parameters.num_bytes


def test_router_without_a_shared_expert_scores_only_routed_experts() -> None:
    layer = MoE(Parameters(CPU, torch.float32), MoEConfig(HIDDEN, INNER, EXPERTS, TOP_K, True), "mlp")
    assert layer.experts.router.shape == (EXPERTS, HIDDEN)
    assert layer.experts.slots == TOP_K


def test_rows_of_a_router_that_no_tensor_fills_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the same weights would have another fingerprint at each load."""
    monkeypatch.setattr(Parameters, "empty", lambda _, *shape, dtype=None: torch.full(shape, 7.0, dtype=dtype))
    layer = MoE(Parameters(CPU, torch.float32), MoEConfig(HIDDEN, INNER, EXPERTS, TOP_K, True, INNER), "mlp")
    router = layer.experts.aligned_router
    assert router is not None
    assert len(router) == 8
    assert router[: EXPERTS + 1].eq(7).all()
    assert router[EXPERTS + 1 :].eq(0).all()


@pytest.mark.parametrize(
    ("shared_inner", "shared_layout", "num_shared"), [(128, Q8, 1), (256, Q8, 0), (128, Q4, 0), (128, None, 0)]
)
@torch.inference_mode()
def test_quantised_experts_agree_with_dense_ones_whether_or_not_the_shared_one_is_in_their_stack(
    shared_inner: int, shared_layout: Layout | None, num_shared: int
) -> None:
    torch.manual_seed(0)
    config = MoEConfig(128, 128, EXPERTS, TOP_K, True, shared_inner)
    routed = (f"mlp.experts.{expert}.{part}_proj.weight" for expert in range(EXPERTS) for part in PARTS)
    shared = (f"mlp.shared_expert.{part}_proj.weight" for part in PARTS)
    packing = dict.fromkeys(routed, Q8) | (dict.fromkeys(shared, shared_layout) if shared_layout else {})
    parameters, dense_parameters = Parameters(CPU, torch.float32, packing), Parameters(CPU, torch.float32)
    layer, dense = MoE(parameters, config, "mlp"), MoE(dense_parameters, config, "mlp")
    assert layer.experts.num_shared == num_shared
    tensors: Tensors = {"norm": torch.rand(128)}
    for binding in parameters.bindings:
        tensors[binding.source] = binding.destination.normal_(std=0.2)
    for packed in parameters.packed_bindings:
        packed.matrix.put_values(packed.first_row, torch.randn(packed.num_rows, packed.matrix.inputs) * 0.1)
        tensors[packed.source] = packed.matrix.values(slice(packed.first_row, packed.first_row + packed.num_rows))
    fill(dense_parameters, tensors)
    norm = RMSNorm(dense_parameters, 128, NormConfig(1e-6), "norm")
    norm.weight.copy_(tensors["norm"])
    hidden = torch.randn(5, 128)
    torch.testing.assert_close(layer(hidden, norm, hidden), dense(hidden, norm, hidden), atol=1e-4, rtol=1e-4)
