"""The matrices of single experts in a stack of all experts of a layer. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from cortex.neuron.weights.stored import StoredTensor, TensorInfo

_EXPERT: Final = re.compile(r"(.+\.mlp\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
_STACK: Final = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")


def stacked_expert(stored: Mapping[str, StoredTensor], name: str) -> StoredTensor | None:
    """The matrix of one expert in a stack of all experts of a layer; None: `name` is no expert of a stack."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    part = match[3]
    stack = stored.get(f"{match[1]}.{'down' if part == 'down' else 'gate_up'}_proj")
    if stack is None or len(stack.shape) != 3 or stack.scales is not None or int(match[2]) >= stack.num_rows:
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
