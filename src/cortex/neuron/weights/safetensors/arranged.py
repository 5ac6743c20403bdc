"""Tensors of a checkpoint under the names that layers read: what a file has together is one tensor for each part.

Rows are only read in another order or in parts, so all of it works on quantised rows as well. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cortex.neuron.weights.delta_heads import DeltaHeads, joint_gates, joint_inputs
from cortex.neuron.weights.stored import StoredTensor, TensorInfo

_JOINT: Final = {"in_proj_qkvz.weight": joint_inputs, "in_proj_ba.weight": joint_gates}
_EXPERT: Final = re.compile(r"(.+\.mlp\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
_STACK: Final = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")


def by_part(config: Mapping[str, Any], stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The inputs of gated delta nets by part, where the checkpoint has them by key head. Raises CheckpointError."""
    if not any(name.rpartition(".linear_attn.")[2] in _JOINT for name in stored):
        return stored
    heads = _heads(config)
    if heads is None:
        return stored
    arranged: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        prefix, _, part = name.rpartition(".linear_attn.")
        build = _JOINT.get(part)
        if build is None:
            arranged[name] = tensor
            continue
        arranged |= {f"{prefix}.linear_attn.{made}": parts for made, parts in build(tensor, heads).items()}
    return arranged


def _heads(config: Mapping[str, Any]) -> DeltaHeads | None:
    """None for sizes that are missing or impossible, which the model's architecture rejects."""
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes = [config.get(key) for key in keys]
    counts = [size for size in sizes if type(size) is int and 0 < size < 1 << 20]
    if len(counts) < len(keys) or counts[1] % counts[0]:
        return None
    return DeltaHeads(counts[0], counts[1], counts[2], counts[3], is_tiled=False)


def stacked_expert(stored: Mapping[str, StoredTensor], name: str) -> StoredTensor | None:
    """The matrix of one expert in a stack of all experts of a layer; None: `name` is no expert of a stack."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    part = match[3]
    stack = stored.get(f"{match[1]}.{'down' if part == 'down' else 'gate_up'}_proj")
    if stack is None or len(stack.shape) != 3 or stack.beside is not None or int(match[2]) >= stack.num_rows:
        return None
    parts = 1 if part == "down" else 2
    num_bytes = stack.group_bytes // parts
    place = stack.rows_in_file(int(match[2]), 1)[0].start * stack.group_bytes
    if stack.shape[1] % parts:
        return None
    return replace(
        stack,
        offset=stack.offset + place + num_bytes * (part == "up"),
        shape=(stack.shape[1] // parts, stack.shape[2]),
        num_bytes=num_bytes,
        selection=None,
    )


def expert_infos(name: str, info: TensorInfo) -> dict[str, TensorInfo]:
    """The matrices of the experts in a stack, by the names that `stacked_expert` knows; empty: it is no stack."""
    match = _STACK.fullmatch(name)
    if match is None or len(info.shape) != 3 or not info.shape[0]:
        return {}
    parts = ("down",) if match[2] == "down" else ("gate", "up")
    experts, rows, columns = info.shape
    one = TensorInfo((rows // len(parts), columns), info.dtype, info.num_bytes // experts // len(parts))
    return {f"{match[1]}.{expert}.{part}_proj.weight": one for expert in range(experts) for part in parts}
