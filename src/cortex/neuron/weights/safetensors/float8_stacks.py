"""Experts that are published as one FP8 tensor for all experts of a layer: each becomes a matrix with its own scales.

Qwen3-VL has each matrix by columns, and its scales too. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.stored import StoredTensor

_STACK: Final = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_SCALES: Final = ("_scale_inv", "_scale")
_UNREAD: Final = ("_activation_scale", "_input_scale")
_PARTS: Final = {"gate_up": ("gate", "up"), "down": ("down",)}
_MAX_EXPERTS: Final = 1 << 12
"""Far above every published model; bounds the work for a damaged file."""


def separated(
    path: Path, config: Mapping[str, Any], block: tuple[int, int] | None, stored: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with `….experts.0.gate_proj.weight` and its `weight_scale_inv` and so on in place of
    `….experts.gate_up_proj` and its scales, or with `….experts.0.gate_up_proj.weight` if they are by columns. `block`:
    rows and columns that share a scale, where the config says it. Raises Unsupported, or Malformed."""
    stacks = {
        name: f"{name}{ending}"
        for name, tensor in stored.items()
        for ending in _SCALES
        if tensor.format == "F8_E4M3" and not name.endswith(".weight") and f"{name}{ending}" in stored
    }
    if not stacks:
        return stored
    text = config.get("text_config")
    hidden = (text if isinstance(text, Mapping) else config).get("hidden_size")
    replaced = {f"{name}{ending}" for name in stacks for ending in ("", *_SCALES, *_UNREAD)}
    rest = {name: tensor for name, tensor in stored.items() if name not in replaced}
    for name, scale_name in stacks.items():
        match, codes, scale = _STACK.fullmatch(name), stored[name], stored[scale_name]
        if match is None or len(codes.shape) != 3 or not codes.num_elements or codes.shape[0] > _MAX_EXPERTS:
            raise Malformed(f"{path}: {name[:200]!r} has FP8 values of the shape {codes.shape}, which is not known")
        if _has_columns(match, stored, hidden):
            rest |= _columns(path, match, codes, scale, hidden)
            continue
        if match[2] == "gate_up" and block is not None:
            _check_gate_up(path, name, codes, scale, block[0])
        rest |= _experts(path, match[1], _PARTS[match[2]], codes, scale)
    return rest


def _has_columns(match: re.Match[str], stored: Mapping[str, StoredTensor], hidden: Any) -> bool:
    """Whether a stack has each matrix by columns. The shape of `down_proj` says so; one of `gate_up_proj` may be
    square."""
    down = stored.get(f"{match[1]}.down_proj")
    if down is not None and len(down.shape) == 3:
        return bool(down.shape[1] != hidden)
    return bool(stored[match[0]].shape[2] != hidden)


def _columns(
    path: Path, match: re.Match[str], codes: StoredTensor, scale: StoredTensor, hidden: Any
) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices of all experts by columns, gate and up as one, and their scales."""
    num_experts, columns, rows = codes.shape
    is_known = columns == hidden and not rows % 2 if match[2] == "gate_up" else rows == hidden
    if not is_known or len(scale.shape) != 3 or not scale.num_elements or scale.shape[0] != num_experts:
        raise Malformed(
            f"{path}: {match[0][:200]!r} has {codes.shape} values and scales of {scale.shape} in a model of {hidden} "
            "columns; download it again"
        )
    for expert in range(num_experts):
        matrix = f"{match[1]}.{expert}.{match[2]}_proj"
        yield f"{matrix}.weight", replace(_part(codes, expert, 0, 1), shape=(rows, columns), is_transposed=True)
        yield f"{matrix}.weight_scale_inv", _part(scale, expert, 0, 1)


def _check_gate_up(path: Path, name: str, codes: StoredTensor, scale: StoredTensor, block_rows: int) -> None:
    """Rejects blocks of which one has rows of gate and of up: neither part has a scale of its own for them."""
    rows, inner = codes.shape[1], codes.shape[1] // 2
    num_blocks = -(-rows // block_rows)
    if num_blocks > 1 and inner % block_rows and len(scale.shape) == 3 and scale.shape[1] == num_blocks:
        raise Unsupported(
            f"{path}: {name[:200]!r} has FP8 scales for blocks of {block_rows} rows, which gate and up share, with "
            f"{inner} rows each; use a repository with a tensor for each expert, the dense weights or a GGUF"
        )


def _experts(
    path: Path, prefix: str, parts: tuple[str, ...], codes: StoredTensor, scale: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices of all experts, and their scales."""
    num_experts, rows, _ = codes.shape
    shape = scale.shape
    if len(shape) != 3:
        shape = (num_experts, rows, 1) if shape == (num_experts, rows) else (scale.num_elements, 1, 1)
    is_divided = not rows % len(parts) and (shape[1] == 1 or not shape[1] % len(parts))
    if not scale.num_elements or shape[0] not in (1, num_experts) or not is_divided:
        raise Malformed(
            f"{path}: {prefix[:200]!r} has {codes.shape} values and scales of {scale.shape}; download it again"
        )
    scale = replace(scale, shape=shape)
    for expert in range(num_experts):
        for place, part in enumerate(parts):
            matrix = f"{prefix}.{expert}.{part}_proj"
            yield f"{matrix}.weight", _part(codes, expert, place, len(parts))
            shared = shape[1] == 1  # by gate and up
            own = _part(scale, expert % shape[0], 0 if shared else place, 1 if shared else len(parts))
            yield f"{matrix}.weight_scale_inv", own


def _part(stack: StoredTensor, index: int, place: int, num_parts: int) -> StoredTensor:
    """The rows of one part of a matrix in a stack."""
    _, rows, columns = stack.shape
    rows //= num_parts
    num_bytes = rows * columns * (stack.num_bytes // stack.num_elements)
    start = stack.offset + (index * num_parts + place) * num_bytes
    return replace(stack, offset=start, shape=(rows, columns), num_bytes=num_bytes)
