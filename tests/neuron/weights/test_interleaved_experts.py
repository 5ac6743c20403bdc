"""The experts of gpt-oss: one matrix each, in the order that layers have, from stacks of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.errors import CheckpointError
from cortex.neuron.weights.safetensors.checkpoint import SafetensorsCheckpoint
from cortex.neuron.weights.sharded import ShardedCheckpoint, TensorSlice

EXPERTS, INNER, HIDDEN = 3, 4, 64
PREFIX = "model.layers.0.mlp.experts"
CODEBOOK = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({f"{PREFIX}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    return path


def four_bits(rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Stacks of blocks and scales, and the values [experts, rows, hidden] that they stand for."""
    codes = torch.randint(0, 16, (EXPERTS, rows, HIDDEN // 32, 32), dtype=torch.uint8)
    scales = torch.randint(120, 130, (EXPERTS, rows, HIDDEN // 32), dtype=torch.uint8)
    values = torch.cat((CODEBOOK, -CODEBOOK))[codes.int()] * torch.exp2(scales.float() - 127)[..., None]
    return {"blocks": codes[..., ::2] | codes[..., 1::2] << 4, "scales": scales}, values.flatten(2)


def test_dense_experts_are_transposed_and_gate_is_apart_from_up(tmp_path: Path) -> None:
    gate_up, down = torch.randn(EXPERTS, HIDDEN, 2 * INNER), torch.randn(EXPERTS, INNER, HIDDEN)
    bias = torch.randn(EXPERTS, 2 * INNER)
    stacks = {"gate_up_proj": gate_up, "down_proj": down, "gate_up_proj_bias": bias, "down_proj_bias": down[:, 0]}
    checkpoint = open_checkpoint(write(tmp_path, stacks))
    for expert in range(EXPERTS):
        by_row = gate_up[expert].t()
        joint = checkpoint.read(f"{PREFIX}.{expert}.gate_up_proj.weight")
        assert torch.equal(joint, torch.cat((by_row[::2], by_row[1::2])))
        assert torch.equal(checkpoint.read(f"{PREFIX}.{expert}.down_proj.weight"), down[expert].t())
    biases = checkpoint.read(f"{PREFIX}.gate_up_proj.bias").view(EXPERTS, 2, INNER)
    assert torch.equal(biases, torch.stack((bias[:, ::2], bias[:, 1::2]), dim=1))
    assert torch.equal(checkpoint.read(f"{PREFIX}.down_proj.bias"), down[:, 0])
    part = TensorSlice(rows=(range(2 * INNER, 6 * INNER),))
    share = ShardedCheckpoint(checkpoint, {f"{PREFIX}.gate_up_proj.bias": part})
    assert torch.equal(share.read(f"{PREFIX}.gate_up_proj.bias"), biases[1:].flatten())


def test_experts_in_four_bits_stand_for_the_values_of_their_codes(tmp_path: Path) -> None:
    gate_up, values = four_bits(2 * INNER)
    down, down_values = four_bits(6)
    parts = {"gate_up_proj": gate_up, "down_proj": down}
    stacks = {f"{name}_{kind}": each for name, kinds in parts.items() for kind, each in kinds.items()}
    checkpoint = open_checkpoint(write(tmp_path, stacks))
    assert {info.dtype for info in checkpoint.tensors.values()} == {"MXFP4"}
    for expert in range(EXPERTS):
        joint = checkpoint.read(f"{PREFIX}.{expert}.gate_up_proj.weight")
        assert torch.equal(joint, torch.cat((values[expert, ::2], values[expert, 1::2])))
        assert torch.equal(checkpoint.read(f"{PREFIX}.{expert}.down_proj.weight"), down_values[expert])


def test_rejects_stacks_that_do_not_fit_together(tmp_path: Path) -> None:
    parts, _ = four_bits(2 * INNER)
    blocks, scales = parts["blocks"], parts["scales"]
    bad: list[tuple[dict[str, Tensor], str]] = [
        ({"gate_up_proj_blocks": blocks}, "has no scales"),
        ({"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales[:, 1:]}, "one for each block"),
        ({"gate_up_proj_blocks": blocks[..., :8], "gate_up_proj_scales": scales}, "16 bytes each"),
        ({"gate_up_proj_blocks": blocks.to(torch.int16), "gate_up_proj_scales": scales}, "I16"),
        ({"gate_up_proj_blocks": blocks[:, 1:], "gate_up_proj_scales": scales[:, 1:]}, "two equal parts"),
        ({"gate_up_proj": torch.zeros(1, 4, 7)}, "two equal parts"),
        ({"gate_up_proj": torch.zeros(4, 8)}, "has the shape"),
        ({"down_proj_bias": torch.zeros(0, 8)}, "has the shape"),
    ]
    for tensors, reason in bad:
        with pytest.raises(CheckpointError, match=reason):
            SafetensorsCheckpoint(write(tmp_path, tensors))


def test_rejects_scales_that_are_not_finite(tmp_path: Path) -> None:
    parts, _ = four_bits(2)
    parts["scales"][1, 0, 0] = 255
    stacks = {f"down_proj_{kind}": each for kind, each in parts.items()}
    checkpoint = open_checkpoint(write(tmp_path, stacks))
    checkpoint.read(f"{PREFIX}.0.down_proj.weight")
    with pytest.raises(CheckpointError, match="not finite"):
        checkpoint.read(f"{PREFIX}.1.down_proj.weight")
