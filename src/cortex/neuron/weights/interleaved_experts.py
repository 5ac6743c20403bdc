"""The experts of gpt-oss: stacks of all experts of a layer, in which the rows of gate and up take turns.

Dense stacks have each matrix by columns. Stacks in MXFP4 have it by rows, as blocks of 32 codes and a scale for each.
Each expert becomes two matrices, `experts.N.gate_up_proj.weight` (gate, then up) and `experts.N.down_proj.weight`.
Needs no torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from cortex.neuron.weights.errors import Malformed
from cortex.neuron.weights.stored import GROUP, ScaleTensors, StoredTensor

_STACK: Final = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales|)")
_BLOCK_BYTES: Final = GROUP // 2
_MAX_EXPERTS: Final = 1 << 12


def separated_experts(tensors: dict[str, StoredTensor], *, takes_turns: bool = True) -> dict[str, StoredTensor]:
    """The tensors with each expert's matrices in place of the stacks. `takes_turns`: whether the rows of gate and up
    do; otherwise all of gate come first. Raises Malformed."""
    separated: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if match is None:
            separated[name] = tensor
            continue
        experts, part, kind = match.groups()
        num_dims = {"_bias": 2, "": 3, "_blocks": 4, "_scales": 3}[kind]
        is_joint = part == "gate_up"
        if len(tensor.shape) != num_dims or not 0 < tensor.num_rows <= _MAX_EXPERTS:
            raise _malformed(tensor, name, f"has the shape {tensor.shape}")
        if is_joint and tensor.shape[1 if kind else 2] % 2:
            raise _malformed(tensor, name, f"has the shape {tensor.shape}, which is not two equal parts")
        if kind == "_bias":
            separated[f"{experts}.{part}_proj.bias"] = _joint_bias(tensor) if is_joint else tensor
        elif kind == "_blocks":
            scales = tensors.get(f"{experts}.{part}_proj_scales")
            if scales is None:
                raise _malformed(tensor, name, "has no scales")
            separated |= _matrices(f"{experts}.{{}}.{part}_proj.weight", _four_bit(name, tensor, scales), is_joint)
        elif not kind:
            columns, rows = tensor.shape[1:]
            dense = [replace(one, shape=(rows, columns), is_transposed=True) for one in _parts(tensor)]
            separated |= _matrices(f"{experts}.{{}}.{part}_proj.weight", dense, is_joint and takes_turns)
    return separated


def _matrices(pattern: str, experts: list[StoredTensor], is_joint: bool) -> dict[str, StoredTensor]:
    rows = experts[0].num_rows if is_joint else 0
    return {pattern.format(number): replace(one, interleaved_rows=rows) for number, one in enumerate(experts)}


def _parts(stack: StoredTensor) -> list[StoredTensor]:
    """Each expert of a stack."""
    size = stack.num_bytes // stack.num_rows
    one = replace(stack, shape=stack.shape[1:], num_bytes=size)
    return [replace(one, offset=stack.offset + number * size) for number in range(stack.num_rows)]


def _joint_bias(stack: StoredTensor) -> StoredTensor:
    """The biases of all experts, one after another: gate's, then up's of each."""
    experts, rows = stack.shape
    return replace(stack, shape=(experts * rows,), interleaved_rows=rows)


def _four_bit(name: str, blocks: StoredTensor, scales: StoredTensor) -> list[StoredTensor]:
    experts, rows, groups, size = blocks.shape
    if size != _BLOCK_BYTES or blocks.format != "U8":
        raise _malformed(
            blocks, name, f"has blocks {blocks.format} {blocks.shape}, MXFP4 has {_BLOCK_BYTES} bytes each"
        )
    if scales.shape != (experts, rows, groups) or scales.format not in ("U8", "F8_E8M0"):
        raise _malformed(blocks, name, f"has the scales {scales.format} {scales.shape}, MXFP4 needs one for each block")
    return [
        replace(
            codes,
            shape=(rows, groups * GROUP),
            format="MXFP4",
            scales=ScaleTensors(name, "mxfp4", 4, 1, GROUP, scale, None),
        )
        for codes, scale in zip(_parts(blocks), _parts(scales), strict=True)
    ]


def _malformed(tensor: StoredTensor, name: str, reason: str) -> Malformed:
    return Malformed(f"{tensor.file.path}: {name[:200]} {reason}; is it the model that its config describes?")
