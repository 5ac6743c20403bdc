"""Models as they are published. Checkpoints whose matrices are quantised compute like the same values in dense form:
names of tensors, joined projections, experts and reordered rows must be those of the dense checkpoint. Other forms are
those that the reference library does not write today.

`published_configs.jsonl` has the `config.json` of one model in each line, with all that its makers wrote into it and
the billions of weights that it is published with (heads that predict further tokens not counted).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.sizes import WeightStorage, weight_bytes

from ..weights.safetensors.test_published import compressed_config, words
from .driver import PROMPT_TOKENS, Driver, assert_parity, load, some_tokens
from .family_models import TABLE, reference_of
from .reference_models import randomised
from .tiny_family import VOCAB
from .transformers_models import reference_of as library_reference_of
from .vision_models import random_reference

ROWS = [json.loads(line) for line in (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()]

GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
FITTING = {"granitemoehybrid": {"mamba_n_heads": 8}}
Stored = tuple[dict[str, Tensor], Tensor]
"""The parts of a matrix, and the values that they mean."""
MATRIX = re.compile(r"(proj|projs?|self_attn\.\w+|mlp\.\w+|experts\.\d+\.\w+|feed_forward\.\w+)\.weight")
DENSE = re.compile(r"embed|lm_head|router|\bgate\.weight|norm|vision|multi_modal|per_layer_model|conv1d|\.conv\.conv")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_published_config_describes_a_model_of_its_published_size(row: dict[str, Any]) -> None:
    architecture = read_architecture(row["config"])
    assert architecture.backend == "native"
    billions = weight_bytes(architecture, WeightStorage(2)) / 2e9
    assert billions == pytest.approx(row["billions"], rel=1e-3)  # norms are in 32 bits
    text = row["config"].get("text_config", row["config"])
    assert architecture.config.context_tokens == text.get("max_position_embeddings", 131_072)
    windows = {text.get("sliding_window")} if text.get("use_sliding_window", True) else {None}
    assert set(architecture.windows) <= {None, *windows}


@pytest.mark.parametrize(
    ("family", "name", "stated"),
    [
        ("mistral3", "mistral", {}),  # Mistral Small 3.2
        ("mistral3", "ministral", {}),  # Ministral 3 8B
        ("mistral3", "ministral", {"tie_word_embeddings": True}),
        ("lfm2", "wide", {"tie_embedding": True}),
        ("arcee", "plain", {"tie_word_embeddings": True}),
    ],
)
@torch.inference_mode()
def test_output_matrix_in_the_files_is_used_whatever_the_config_says(
    family: str, name: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    reference = (library_reference_of if family == "arcee" else reference_of)(family, name)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(config | stated))
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(logits, reference(tokens[None]).logits[0])


@torch.inference_mode()
def test_experts_in_one_float8_tensor_give_the_logits_of_their_values(tmp_path: Path) -> None:
    reference = reference_of("glm4_moe", "plain")
    stacked: dict[str, torch.Tensor] = {}
    for name, parameter in reference.named_parameters():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            scale = torch.exp2((parameter.abs().amax((1, 2), keepdim=True) / 448).log2().ceil())
            codes = (parameter / scale).to(torch.float8_e4m3fn)
            stacked |= {name: codes, f"{name}_scale_inv": scale}
            parameter.copy_(codes.float() * scale)
    assert stacked
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(rest | stacked, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(logits, reference(tokens[None]).logits[0])


def float8_blocks(matrix: Tensor) -> Stored:
    rows, columns = matrix.shape
    scale = torch.rand(-(-rows // 16), -(-columns // 16)) * 0.02 + 0.01
    spread = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
    codes = (matrix / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def float8_rows(matrix: Tensor) -> Stored:
    scale = torch.rand(len(matrix), 1) * 0.02 + 0.01
    codes = (matrix / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def _integers(matrix: Tensor, zero: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales and zeros, and the values that they mean."""
    rows, columns = matrix.shape
    scale = (torch.rand(rows, columns // GROUP) * 0.03 + 0.02).half()
    zero = torch.randint(6, 10, scale.shape) if zero is None else zero.expand(scale.shape)
    spread, shift = (part.float().repeat_interleave(GROUP, 1) for part in (scale, zero))
    codes = (matrix / spread + shift).round().clamp(0, 15)
    return codes.to(torch.int64), scale, zero, (codes - shift) * spread


def awq(matrix: Tensor) -> Stored:
    codes, scale, zero, values = _integers(matrix)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(rows: Tensor) -> Tensor:
        return words(rows.reshape(len(rows), -1, 8)[..., order].flatten(1), 4)

    return {"qweight": packed(codes.t()), "qzeros": packed(zero.t()), "scales": scale.t()}, values


def gptq(matrix: Tensor) -> Stored:
    codes, scale, zero, values = _integers(matrix)
    parts = {"qweight": words(codes, 4).t(), "qzeros": words((zero - 1).t(), 4), "scales": scale.t()}
    return {**parts, "g_idx": (torch.arange(matrix.shape[1]) // GROUP).int()}, values


def gptq_in_order(matrix: Tensor) -> Stored:
    """Columns in an order of their own in each matrix."""
    place = torch.randperm(matrix.shape[1]).argsort()
    codes, scale, zero, values = _integers(matrix[:, place.argsort()])
    parts = {"qweight": words(codes[:, place], 4).t(), "qzeros": words((zero - 1).t(), 4), "scales": scale.t()}
    return {**parts, "g_idx": (place // GROUP).int()}, values[:, place]


def compressed(matrix: Tensor) -> Stored:
    codes, scale, _, values = _integers(matrix, torch.tensor(8))
    shape = torch.tensor(matrix.shape)
    return {"weight_packed": words(codes, 4), "weight_scale": scale, "weight_shape": shape}, values


FLOATS: list[tuple[Callable[[Tensor], Stored], dict[str, Any]]] = [
    (float8_blocks, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    (float8_rows, compressed_config(8)),
]
INTEGERS: list[tuple[Callable[[Tensor], Stored], dict[str, Any]]] = [
    (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP}),
    (gptq, {"quant_method": "gptq", "bits": 4, "desc_act": False, "checkpoint_format": "gptq", "group_size": GROUP}),
    (compressed, compressed_config(4)),
    (gptq_in_order, {"quant_method": "gptq", "bits": 4, "desc_act": True, "group_size": GROUP}),
]


FAMILIES = [
    *("qwen2", "mistral3", "phi3", "gemma3", "gemma4", "granite", "glm4", "glm4_moe", "glm4_moe_lite"),
    *("ernie4_5", "cohere2", "muse_glimmer", "minimax_m2", "lfm2", "granitemoehybrid", "nemotron_h"),
]
"""Each has names, joined tensors or an order of rows that others lack."""


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_quantised_checkpoint_gives_the_logits_of_its_values(family: str, tmp_path: Path) -> None:
    """In one format of 8 and one of 4 bits; every format occurs with several families."""
    place, entry = FAMILIES.index(family), TABLE[family]
    name = list(entry.changes)[-1 if family != "phi3" else 0]  # whose last one lists a factor for each dimension
    wide = replace(entry, changes={name: SIZES | entry.changes[name] | FITTING.get(family, {})})
    randomised(lambda: entry.model(wide.config_of(name)), std=0.15, vector_std=0.5).save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(0))
    for store, described in (FLOATS[place % len(FLOATS)], INTEGERS[place % len(INTEGERS)]):
        dense, packed = dict(tensors), dict(tensors)
        for matrix, values in tensors.items():
            is_matrix = MATRIX.search(matrix) and not DENSE.search(matrix) and values.dim() == 2
            if is_matrix and not values.shape[0] % 8 and not values.shape[1] % GROUP:
                parts, dense[matrix] = store(packed.pop(matrix).float())
                packed |= {f"{matrix.removesuffix('weight')}{part}": stored for part, stored in parts.items()}
        assert len(packed) > len(tensors)
        logits = []
        for label, stored, quantised in (("dense", dense, None), ("packed", packed, described)):
            path = tmp_path / f"{store.__name__} {label}"
            path.mkdir()
            save_file({key: value.contiguous() for key, value in stored.items()}, path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
            logits += Driver(load(path), 1).logits([tokens], [[len(tokens)]])
        # Products with 4-bit matrices round activations. A wrong row or scale changes everything.
        error = (logits[1] - logits[0]).abs().max() / logits[0].abs().max()
        assert error < (1e-3 if described in [each for _, each in FLOATS] else 0.03)


@torch.inference_mode()
def test_float8_stacks_of_experts_by_columns_give_the_logits_of_their_values(tmp_path: Path) -> None:
    """As Qwen publishes Qwen3-VL with experts: values and scales as inputs x outputs."""
    random_reference("qwen3_vl_moe").save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    dense, packed = dict(tensors), dict(tensors)
    stacks = [name for name in tensors if re.search(r"mlp\.experts\.(gate_up|down)_proj$", name)]
    assert stacks
    for name in stacks:
        hidden = config["text_config"]["hidden_size"]
        by_columns = tensors[name].float()
        if by_columns.shape[2 if "gate_up" in name else 1] == hidden:
            by_columns = by_columns.transpose(1, 2)
        stored = [float8_blocks(matrix) for matrix in by_columns]
        packed[name] = torch.stack([parts["weight"] for parts, _ in stored])
        packed[f"{name}_scale_inv"] = torch.stack([parts["weight_scale_inv"] for parts, _ in stored])
        dense[name] = torch.stack([values for _, values in stored]).transpose(1, 2)
    tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(0))
    logits = []
    for label, each, quantised in (("dense", dense, None), ("packed", packed, FLOATS[0][1])):
        (path := tmp_path / label).mkdir()
        save_file({name: tensor.contiguous() for name, tensor in each.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
        logits += Driver(load(path), 1).logits([tokens], [[len(tokens)]])
    assert (logits[1] - logits[0]).abs().max() < 1e-3 * logits[0].abs().max()
