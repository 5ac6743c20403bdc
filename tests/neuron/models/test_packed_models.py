"""Models whose matrices stay quantised, as on a GPU, against the same models in dense form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.neuron.models.driver import Driver
from tests.neuron.models.gguf_builds import BUILDS, VOCAB, reference_of
from tests.neuron.models.gguf_models import write_gguf

from cortex.neuron.engine.loading.loading import LoadedModel, build_model
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.float8.layout import FLOAT8_BLOCKS, FLOAT8_ROWS, Float8Layout
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.layouts import DeviceLayout, MatrixLayout
from cortex.neuron.kernels.quantised.layout import FP4
from cortex.neuron.kernels.quantised.matrix import PackedMatrix
from cortex.neuron.kernels.quantised.recipes import RECIPES, Recipe
from cortex.neuron.layers.moe import MoE
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.packing import MatrixDevice, choose_layouts
from cortex.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from cortex.neuron.weights.transfer import PackedPlacement, Placement, load_into

CPU = torch.device("cpu")
GPU = MatrixDevice("cuda", "bfloat16")
NUM_TOKENS = 20
IN_SAFETENSORS = ("qwen3moe", "qwen3next", "qwen35", "qwen35moe", "glm4", "glm4moe", "gemma3", "gpt-oss")


def load(checkpoint: Checkpoint, packing: Mapping[str, MatrixLayout]) -> LoadedModel:
    def fill(parameters: Parameters) -> None:
        placements = [
            Placement(binding.source, binding.destination, transform=binding.transform, shape=binding.shape)
            for binding in parameters.bindings_from(checkpoint.tensors)
        ]
        packed = [
            PackedPlacement(binding.source, binding.matrix, binding.first_row, binding.num_rows)
            for binding in parameters.packed_bindings
        ]
        load_into(checkpoint, placements, packed, progress=lambda *_: None, cancelled=lambda: False)

    spec = LoadSpec(str(checkpoint.path), dtype="float32", max_num_seqs=3)
    return build_model(checkpoint.config, spec, CPU, fill, packing=packing)


def logits_of(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    (logits,) = Driver(loaded.model, 1).logits([tokens], [[NUM_TOKENS - 1, 1]])
    return logits


def as_in_files(tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Queries or keys with the rotated rows of each head in the order of the family's files."""
    if config["model_type"] not in ("cohere2", "ernie4_5", "ernie4_5_moe", "glm4"):
        return tensor
    fraction = {**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor", 1.0)
    rotated = int(config["head_dim"] * fraction)
    heads = tensor.view(-1, config["head_dim"], *tensor.shape[1:]).clone()
    heads[:, :rotated] = heads[:, :rotated].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return heads.view_as(tensor)


def rounded(checkpoint: Checkpoint, packed: LoadedModel, path: Path) -> Checkpoint:
    """The checkpoint in dense form with the values of the packed matrices."""
    bindings = {binding.source: binding for binding in packed.model.parameters.packed_bindings}
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors if name not in bindings}
    for name, binding in bindings.items():
        tensors[name] = binding.matrix.values(slice(binding.first_row, binding.first_row + binding.num_rows))
    for name in [
        name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))
    ]:
        tensors[name] = as_in_files(tensors[name], checkpoint.config)
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    path.mkdir()
    save_file({name: tensors[name].contiguous() for name in tensors if name not in stacks}, path / "model.safetensors")
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (path / "config.json").write_text(json.dumps(config))
    return open_checkpoint(path)


def write_float8(path: Path, architecture: str, size: int) -> None:
    """A published checkpoint with a scale for each block of `size` x `size`, or with 0 for each row."""
    reference_of(architecture).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        blocks = weight.view(len(weight) // (size or 1), size or 1, -1, size or weight.shape[1])
        scale = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv" if size else f"{name}_scale"] = scale
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    published = {"quant_method": "fp8", "weight_block_size": [size, size]} if size else {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": published}))


def write_mxfp4(path: Path, reference: Any) -> None:
    """gpt-oss as it is published. The model then has the values that the files stand for."""
    reference.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        by_row = tensors.pop(name).transpose(1, 2).contiguous()
        blocks, scales, values = four_bit_blocks(by_row)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        reference.get_parameter(name).data = values.transpose(1, 2).contiguous()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    published = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": published}))


def four_bit_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., columns] → [..., groups, 16] bytes, [..., groups] exponents, and the values that both stand for"""
    codebook = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codebook = torch.cat((codebook, -codebook))
    groups = weights.float().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1, keepdim=True).div(6).log2().ceil()
    codes = (groups / exponents.exp2()).unsqueeze(-1).sub(codebook).abs().argmin(-1)
    values = codebook[codes] * exponents.exp2()
    pairs = codes.to(torch.uint8).unflatten(-1, (16, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents[..., 0] + 127).to(torch.uint8), values.view_as(weights)


def assert_packed_computes_as_dense(path: Path, dense_path: Path, recipe: Recipe | None = None) -> LoadedModel:
    checkpoint = open_checkpoint(path)
    routers = (".mlp.gate.weight", ".shared_expert_gate.weight")
    layouts = choose_layouts(GPU, checkpoint.tensors, recipe)
    layouts = {name: layout for name, layout in layouts.items() if not name.endswith(routers)}
    packed = load(checkpoint, layouts)
    assert sorted(binding.source for binding in packed.model.parameters.packed_bindings) == sorted(layouts)
    dense = load(rounded(checkpoint, packed, dense_path), {})
    tokens = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = logits_of(dense, tokens)
    assert (logits_of(packed, tokens) - expected).abs().max() < 1e-3 * expected.abs().max()
    return packed


def expert_layouts(loaded: LoadedModel) -> set[DeviceLayout]:
    """The layouts of all mixtures of a model."""
    mixtures = [layer.mlp.experts for layer in loaded.model.layers if isinstance(layer.mlp, MoE)]
    assert mixtures
    matrices = [matrix for experts in mixtures for matrix in (experts.gate_up, experts.down)]
    return {matrix.codes.layout for matrix in matrices if isinstance(matrix, PackedMatrix | Float8Matrix)}


@pytest.mark.parametrize("architecture", BUILDS)
@torch.inference_mode()
def test_gguf_of_every_architecture_stays_quantised(architecture: str, tmp_path: Path) -> None:
    reference = reference_of(architecture)
    write_gguf(tmp_path / "m.gguf", architecture, reference, ("Q4_K",))
    assert_packed_computes_as_dense(tmp_path / "m.gguf", tmp_path / "dense")


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
@torch.inference_mode()
def test_dense_gguf_is_quantised_at_load(architecture: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture, reference_of(architecture), ("F16", "BF16"))
    assert_packed_computes_as_dense(tmp_path / "m.gguf", tmp_path / "dense", RECIPES["q4_k"])


@pytest.mark.parametrize("architecture", IN_SAFETENSORS)
@torch.inference_mode()
def test_safetensors_of_every_family_are_quantised_at_load(architecture: str, tmp_path: Path) -> None:
    reference_of(architecture).save_pretrained(tmp_path)
    assert_packed_computes_as_dense(tmp_path, tmp_path / "dense", RECIPES["q4_k"])


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen3next", "gpt-oss"])
@torch.inference_mode()
def test_experts_that_are_rounded_to_fp8_at_load_stay_so(architecture: str, tmp_path: Path) -> None:
    reference_of(architecture).save_pretrained(tmp_path)
    packed = assert_packed_computes_as_dense(tmp_path, tmp_path / "dense", RECIPES["fp8"])
    assert expert_layouts(packed) == {FLOAT8_ROWS}


@torch.inference_mode()
def test_experts_of_a_published_mxfp4_checkpoint_stay_in_four_bits(tmp_path: Path) -> None:
    reference = reference_of("gpt-oss")
    write_mxfp4(tmp_path, reference)
    packed = assert_packed_computes_as_dense(tmp_path, tmp_path / "dense")
    assert expert_layouts(packed) == {FP4}
    tokens = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = reference(tokens[None]).logits[0]
    for loaded in (packed, load(open_checkpoint(tmp_path), {})):
        assert (logits_of(loaded, tokens) - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize(("size", "layout"), [(128, FLOAT8_BLOCKS), (0, FLOAT8_ROWS)])
@torch.inference_mode()
def test_experts_of_a_published_fp8_checkpoint_stay_as_they_are(
    size: int, layout: Float8Layout, tmp_path: Path
) -> None:
    write_float8(tmp_path, "qwen3moe", size)
    packed = assert_packed_computes_as_dense(tmp_path, tmp_path / "dense")
    assert expert_layouts(packed) == {layout}


@pytest.mark.parametrize("size", [128, 0])
@torch.inference_mode()
def test_joint_and_interleaved_rows_of_a_published_fp8_checkpoint_compute_as_dense(size: int, tmp_path: Path) -> None:
    """Where a block of scales is cut by the new order, the rows are rounded again."""
    write_float8(tmp_path, "glm4", size)
    assert_packed_computes_as_dense(tmp_path, tmp_path / "dense")
