"""Stacks of experts in FP8, each expert against its values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cortex.neuron.weights.decode import decode, mapped_bytes
from cortex.neuron.weights.errors import CheckpointError
from cortex.neuron.weights.safetensors.checkpoint import SafetensorsCheckpoint

EXPERTS, HIDDEN, INNER, BLOCK = 3, 64, 96, 32
PREFIX = "model.layers.0.mlp.experts"


def codes(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def opened(path: Path, tensors: dict[str, Tensor], block: list[int] | None) -> SafetensorsCheckpoint:
    save_file({f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    quantised = {"quant_method": "fp8", "weight_block_size": block}
    (path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "quantization_config": quantised}))
    return SafetensorsCheckpoint(path)


@pytest.mark.parametrize("kind", ["blocks", "rows", "experts", "stack"])
def test_every_expert_has_the_values_of_its_part_of_the_stack(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    shapes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, (rows, columns) in shapes.items():
        block = {"blocks": (BLOCK, BLOCK), "rows": (1, columns)}.get(kind, (rows, columns))
        scale = torch.rand(1 if kind == "stack" else EXPERTS, rows // block[0], columns // block[1]) + 0.5
        stack = codes(EXPERTS, rows, columns)
        spread = scale.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
        stored = {"rows": scale.squeeze(2), "stack": scale.flatten()}.get(kind, scale)
        tensors |= {name: stack, f"{name}_scale_inv": stored}
        tensors[f"{name}_activation_scale"] = torch.ones(1)
        values[name] = stack.float() * spread
    checkpoint = opened(tmp_path, tensors, [BLOCK, BLOCK] if kind == "blocks" else None)
    assert len(checkpoint.tensors) == 3 * EXPERTS
    for expert in range(EXPERTS):
        gate, up = values["gate_up_proj"][expert].chunk(2)
        for part, expected in (("gate", gate), ("up", up), ("down", values["down_proj"][expert])):
            read = checkpoint.read(f"{PREFIX}.{expert}.{part}_proj.weight")
            torch.testing.assert_close(read, expected, rtol=2**-8, atol=1e-6)  # scales are rounded to bfloat16
    checkpoint.close()


@pytest.mark.parametrize("block", [(BLOCK, BLOCK), (HIDDEN, 1)], ids=["blocks", "rows"])
def test_stack_by_columns_has_the_values_of_its_matrices(tmp_path: Path, block: tuple[int, int]) -> None:
    """As Qwen3-VL is published. Rows and columns of a matrix are read alone, as by several devices."""
    torch.manual_seed(0)
    shapes = {"gate_up_proj": (HIDDEN, 2 * INNER), "down_proj": (INNER, HIDDEN)}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, (columns, rows) in shapes.items():
        high, wide = min(block[0], columns), block[1]
        if columns % high:
            high = columns
        scale = torch.rand(EXPERTS, columns // high, rows // wide) + 0.5
        stack = codes(EXPERTS, columns, rows)
        tensors |= {name: stack, f"{name}_scale_inv": scale}
        spread = scale.repeat_interleave(high, 1).repeat_interleave(wide, 2)
        values[name] = (stack.float() * spread).transpose(1, 2)
    checkpoint = opened(tmp_path, tensors, [BLOCK, BLOCK] if block[1] == BLOCK else None)
    assert len(checkpoint.tensors) == 2 * EXPERTS
    for name, expected in values.items():
        for expert in range(EXPERTS):
            matrix = f"{PREFIX}.{expert}.{name}.weight"
            assert checkpoint.tensors[matrix].scaled is None
            read = checkpoint.read(matrix)
            torch.testing.assert_close(read, expected[expert], rtol=2**-8, atol=1e-6)
            part = checkpoint.stored(matrix).with_rows((range(8, 40),)).with_columns(range(4, 20))
            torch.testing.assert_close(decode(part, mapped_bytes(part)), read[8:40, 4:20], rtol=0, atol=0)
    checkpoint.close()


@pytest.mark.parametrize(
    ("name", "stack", "scale", "block", "message"),
    [
        ("gate_up_proj", (EXPERTS, HIDDEN + 1, 2 * INNER), (EXPERTS, 1, 1), None, "in a model of 64 columns"),
        ("gate_up_proj", (EXPERTS, HIDDEN, 2 * INNER), (EXPERTS,), None, "in a model of 64 columns"),
        ("gate_up_proj", (EXPERTS, HIDDEN, 2 * INNER), (EXPERTS, 5, 1), None, "scales do not divide"),
        ("gate_up_proj", (EXPERTS, HIDDEN, 2 * INNER), (EXPERTS, 1, 4 * INNER), None, "values by columns, and scales"),
        ("down_proj", (EXPERTS, INNER, HIDDEN + 1), (EXPERTS, 1, 1), None, "in a model of 64 columns"),
        ("gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN), (2, 1, 1), None, "scales of"),
        ("gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, 3, 2), None, "scales of"),
        ("gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, 0, 0), None, "scales of"),
        ("gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, INNER), None, "scales of"),
        ("gate_up_proj", (EXPERTS, 192, HIDDEN), (EXPERTS, 2, 1), 128, "blocks of 128 rows, which gate and up share"),
        ("gate_up_proj", (EXPERTS, 320, HIDDEN), (EXPERTS, 3, 1), 128, "blocks of 128 rows, which gate and up share"),
        ("gate_up_proj", (2 * INNER, HIDDEN), (1,), None, "which is not known"),
        ("up_proj", (EXPERTS, INNER, HIDDEN), (EXPERTS, 1, 1), None, "which is not known"),
    ],
)
def test_rejects_a_stack_that_cannot_be_separated(
    tmp_path: Path, name: str, stack: tuple[int, ...], scale: tuple[int, ...], block: int | None, message: str
) -> None:
    tensors = {name: codes(*stack), f"{name}_scale_inv": torch.ones(scale)}
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, tensors, None if block is None else [block, block])
