"""Mixtures in GPTQ with `desc_act`: each expert has its inputs in an order of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading import loading
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.kernels.quantised.layout import INT4, Q8, OrderedLayout
from cortex.neuron.kernels.quantised.matrix import OrderedMatrix, PackedMatrix
from cortex.neuron.layers.moe import MoE
from cortex.neuron.models.packing import choose_layouts
from cortex.neuron.models.sizes import weight_bytes
from cortex.neuron.node.inspection_process.preflight import inspect

from ...engine_runs import run
from ...tiny_models import tiny_sizes
from .test_published_models import CPU, GPU, VOCAB, gptq, loaded, logits_of

EXPERTS, INNER = 12, 128
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {"num_experts": EXPERTS, "shared_expert_intermediate_size": INNER},
    ),
}
UNUSED, SHARED = 4, 50
"""An expert that calibration did not choose has its columns as they were."""


def numbers(name: str) -> int:
    """Names the order of a matrix's columns: one for the inputs of each expert."""
    expert = re.search(r"\.experts\.(\d+)\.", name)
    return int(expert[1]) if expert else SHARED * (".shared_expert" in name)


def write(path: Path, number: Callable[[str], int] = numbers, family: str = "glm4_moe") -> None:
    torch.manual_seed(0)
    config_of, model_of, shared = FAMILIES[family]
    sizes = tiny_sizes(vocab_size=VOCAB, hidden_size=128, intermediate_size=256)
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": INNER, "norm_topk_prob": True}
    model = model_of(config_of(**sizes, **shared))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.15)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        has_order = f".experts.{UNUSED}." not in name and "o_proj" not in name  # ranks cut the columns of o_proj
        parts, _ = gptq(tensors.pop(name).float(), has_order=has_order, number=number(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    quantisation = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))


def layouts_of(path: Path, part: str) -> list[MatrixLayout]:
    layouts = choose_layouts(GPU, inspect(path).tensors, None)
    return [layout for name, layout in layouts.items() if re.search(part, name)]


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, matrices are loaded as on a GPU."""
    return lambda: monkeypatch.setattr(
        loading, "matrix_layouts", lambda tensors, *_: choose_layouts(GPU, tensors, None)
    )


@pytest.mark.parametrize("shares_order", [True, False], ids=["shared expert in the stack", "shared expert apart"])
def test_experts_stay_in_four_bits_without_rounding(
    shares_order: bool, tmp_path: Path, as_on_gpu: Callable[[], None]
) -> None:
    """The shared expert is one of the matrix if its gate and up have one order."""
    write(tmp_path, lambda name: numbers(name) + ("shared_experts.up" in name and not shares_order))
    expected = logits_of(tmp_path)
    as_on_gpu()
    model = loaded(tmp_path)
    assert (logits_of(tmp_path) - expected).norm() / expected.norm() < 1e-5
    for layer in model.layers:
        assert isinstance(layer.mlp, MoE)
        experts = layer.mlp.experts
        assert isinstance(experts.gate_up, OrderedMatrix)
        assert isinstance(experts.down, PackedMatrix)
        assert not isinstance(experts.down, OrderedMatrix)
        assert {experts.gate_up.codes.layout, experts.down.codes.layout} == {INT4}
        assert len(experts.gate_up.order) == EXPERTS + shares_order
        assert experts.num_shared == shares_order
    facts = inspect(tmp_path)
    planned = ModelSizes.of(facts.architecture, replace(facts.storage(GPU), item_bytes=4))
    assert planned.weight_bytes == model.parameters.num_bytes
    plain = replace(facts.storage(GPU), item_bytes=4, packing=dict.fromkeys(facts.storage(GPU).packing, INT4))
    assert planned.token_room > ModelSizes.of(facts.architecture, plain).token_room  # the rows of pairs in order


def test_experts_whose_gate_and_up_differ_become_codes_of_eight_bits(tmp_path: Path) -> None:
    """All of the layer, because its experts are one matrix."""
    write(tmp_path, lambda name: numbers(name) + 100 * ("layers.1.mlp.experts.2.up" in name))
    [first, second] = [
        set(layouts_of(tmp_path, rf"layers\.{layer}\.mlp\.experts\.[^4]\.(gate|up)")) for layer in (0, 1)
    ]
    assert all(isinstance(layout, OrderedLayout) for layout in first)
    assert second == {Q8}
    assert set(layouts_of(tmp_path, r"experts\.\d+\.down")) == {INT4}


def test_ranks_have_the_orders_of_their_experts(tmp_path: Path, as_on_gpu: Callable[[], None]) -> None:
    write(tmp_path)
    as_on_gpu()
    expected = logits_of(tmp_path)
    ranks = [RankSpec(rank, 2, str(tmp_path)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(lambda rank: logits_of(tmp_path, rank), ranks):
            assert (logits - expected).norm() / expected.norm() < 1e-5


def test_layers_with_experts_in_host_memory_have_codes_of_eight_bits(
    tmp_path: Path, as_on_gpu: Callable[[], None]
) -> None:
    write(tmp_path)
    as_on_gpu()
    spec = LoadSpec(str(tmp_path), dtype="float32", max_num_seqs=4)
    request = EngineRequest("r", tuple(range(40)), 6, SamplingParams(temperature=0.0), prompt_logprobs=0)
    found = []
    whole = loading.load_model(spec, CPU, lambda *_: None, lambda: False)
    small_bytes = whole.weight_bytes - 50_000 + whole.memory.num_bytes // 4
    for limited in (spec, replace(spec, memory_bytes=small_bytes, host_weight_bytes=1 << 30)):
        model = loading.load_model(limited, CPU, lambda *_: None, lambda: False)
        parameters, storage = model.body.parameters, replace(inspect(tmp_path).storage(GPU), item_bytes=4)
        assert weight_bytes(model.body.architecture, storage) == parameters.num_bytes
        assert (model.host is None) == (limited is spec)
        engine = Engine(model, spec, moves_weights=True)
        run(engine, request)
        engine.sleep()
        engine.wake(lambda *_: None)
        outputs = run(engine, request)["r"]
        found.append(torch.tensor([each.logprob for output in outputs for each in output.prompt_logprobs]))
        engine.close()
    assert 0 < (found[1] - found[0]).abs().max() < 0.2


def test_orders_of_a_model_of_the_library_are_counted(tmp_path: Path, as_on_gpu: Callable[[], None]) -> None:
    write(tmp_path, family="qwen2_moe")
    as_on_gpu()
    model = loaded(tmp_path)
    assert any(isinstance(binding.matrix, OrderedMatrix) for binding in model.parameters.packed_bindings)
    facts = inspect(tmp_path)
    assert facts.architecture.backend == "transformers"
    assert weight_bytes(facts.architecture, replace(facts.storage(GPU), item_bytes=4)) == model.parameters.num_bytes
