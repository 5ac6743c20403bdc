"""Everything that can be known before memory is touched: are the files whole, is the family supported, is the
quantisation what was asked for, does it fit. Reads headers only, imports no torch; run on a thread: disks may be slow.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex.neuron.engine.memory.plan import PAGE_TOKENS, ModelSizes
from cortex.neuron.engine.memory.reserve import MemoryReserve
from cortex.neuron.kernels.products.four_bit_size import four_bit_bytes
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.registry import SUPPORTED, reject_quantised
from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.errors import CheckpointError
from cortex.neuron.weights.gguf.types import GROUPED_BITS
from cortex.neuron.weights.stored import TensorInfo
from cortex.neuron.worker.discovery import DeviceReading
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node import Device

_DENSE_FORMATS = frozenset({"F64", "F32", "F16", "BF16"})
_MIXTURE = re.compile(r"_(?:XS|S|M|L|XL)$")
"""`Q4_K_M` says how Q4_K is mixed with other formats; the tensors themselves only know of Q4_K."""
_FUSED = re.compile(r"\b(?:[qkv]|gate|up)_proj\b")
"""Projections of the same input, which are one matrix in memory."""
_LEFT_OUT = ("visual.", "model.visual.", "vision_tower.", "mtp.")
"""Parts of a checkpoint that are not loaded."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's files, judged."""

    path: Path
    family: str
    quant: str | None
    """The format of most of its weights, where that is not a plain one."""
    context_tokens: int
    vocab: int
    num_weights: int
    """Numbers, whatever the files store them in."""
    four_bit_bytes: int
    """Of the second form that a CPU keeps of quantised matrices, where it computes faster with that."""
    token_numbers: int
    """Keys and values of one token over the layers that keep them."""
    state_numbers: int = 0
    """The latest inputs in a recurrent state, over all layers."""
    state_float32s: int = 0
    """Its memory, which is kept in float32 whatever the model computes in."""

    def sizes(self, item_bytes: int, context_tokens: int | None, *, has_four_bits: bool = False) -> ModelSizes:
        """What its parts take in numbers of so many bytes."""
        return ModelSizes(
            weight_bytes=self.num_weights * item_bytes + (self.four_bit_bytes if has_four_bits else 0),
            page_bytes=self.token_numbers * PAGE_TOKENS * item_bytes,
            slot_bytes=self.state_numbers * item_bytes + self.state_float32s * 4,
            vocab=self.vocab,
            context_tokens=min(context_tokens or self.context_tokens, self.context_tokens),
        )


def inspect(path: Path, quant: str | None = None, *, name: str | None = None) -> ModelFacts:
    """Opens the files at `path` and judges them; with `quant`, they must be quantised that way already. `name` is what
    people call the model: a snapshot's folder is named by a digest.

    Raises LoadFailed with the reason and what to do about it.
    """
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        raise LoadFailed(str(error)) from error
    name = name or path.name
    try:
        facts = _judge(path, name, checkpoint.config, list(checkpoint.tensors.items()))
    finally:
        checkpoint.close()
    if quant is not None:
        check_quant(facts, name, quant)
    return facts


def check_quant(facts: ModelFacts, name: str, quant: str) -> None:
    """Raises LoadFailed unless the files are quantised as asked: nothing is quantised at load."""
    wanted = quant.upper()
    is_gguf = facts.path.suffix == ".gguf"
    if is_gguf and (wanted in facts.path.stem.upper() or _MIXTURE.sub("", wanted) == (facts.quant or "").upper()):
        return
    if not is_gguf:
        raise LoadFailed(
            f"{name} is not quantised at load; for {quant} name a GGUF of it as the source (a file, or "
            f"owner/name-GGUF:{quant} on the hub), or leave `quant` out"
        )
    raise LoadFailed(
        f"{name} is quantised as {facts.quant or 'plain numbers'}, not as {quant}; name the GGUF of {quant} "
        "as the source, or leave `quant` out"
    )


def _judge(path: Path, name: str, config: Mapping[str, Any], tensors: Sequence[tuple[str, TensorInfo]]) -> ModelFacts:
    family = config.get("model_type")
    if family not in SUPPORTED:
        raise LoadFailed(
            f"{name} is of family {family!r}, which is not supported; supported are {', '.join(SUPPORTED)} "
            "(docs/adding-a-model.md shows how to add one)"
        )
    try:
        reject_quantised(config)
    except UnsupportedModel as error:
        raise LoadFailed(f"{name} cannot be loaded: {error}") from error
    # Models with more than text keep the text part's sizes one level down.
    sizes: Mapping[str, Any] = config.get("text_config") or config
    tied = bool(config.get("tie_word_embeddings", sizes.get("tie_word_embeddings", False)))
    left_out = (*_LEFT_OUT, "lm_head.") if tied else _LEFT_OUT
    kept = {source: tensor for source, tensor in tensors if not source.startswith(left_out)}
    num_linear, num_attention = _layer_counts(sizes)
    try:
        return ModelFacts(
            path=path,
            family=family,
            quant=_stored_quant(list(kept.values())),
            context_tokens=int(sizes["max_position_embeddings"]),
            vocab=int(sizes["vocab_size"]),
            num_weights=sum(math.prod(tensor.shape) for tensor in kept.values()),
            four_bit_bytes=_four_bit_bytes(kept, tied=tied),
            token_numbers=num_attention * _token_numbers(sizes),
            state_numbers=num_linear * _state_numbers(sizes) if num_linear else 0,
            state_float32s=num_linear * _state_float32s(sizes) if num_linear else 0,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise LoadFailed(f"the config of {name} is not usable: {error!r}; download the model again") from error


def _stored_quant(tensors: Sequence[TensorInfo]) -> str | None:
    """The format of most of the weights; None where that is a plain one."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += math.prod(tensor.shape)
    most = max(elements, key=lambda name: elements[name], default=None)
    return most.lower() if most is not None and most not in _DENSE_FORMATS else None


def _four_bit_bytes(tensors: Mapping[str, TensorInfo], *, tied: bool) -> int:
    """Of all matrices that are stored in groups; an embedding is multiplied with only where it is the head, too."""
    matrices: dict[str, list[tuple[int, int]]] = {}
    for source, tensor in tensors.items():
        if len(tensor.shape) == 2 and (tied or "embed_tokens" not in source):
            rows, inputs = tensor.shape
            bits = GROUPED_BITS.get(tensor.dtype, 0)
            matrices.setdefault(_FUSED.sub("fused", source), []).append((bits, four_bit_bytes(rows, inputs, bits)))
    return sum(
        sum(num_bytes for _, num_bytes in parts)
        for parts in matrices.values()
        if len({bits for bits, _ in parts}) == 1 and all(num_bytes for _, num_bytes in parts)
    )


def _layer_counts(sizes: Mapping[str, Any]) -> tuple[int, int]:
    """(layers with a recurrent state, layers with keys and values)"""
    num_layers = int(sizes["num_hidden_layers"])
    layer_types = sizes.get("layer_types")
    if isinstance(layer_types, list) and layer_types:
        num_linear = sum(kind == "linear_attention" for kind in layer_types)
    elif "linear_num_value_heads" in sizes:
        num_linear = num_layers - num_layers // int(sizes.get("full_attention_interval") or 4)
    else:
        num_linear = 0
    return num_linear, num_layers - num_linear


def _token_numbers(sizes: Mapping[str, Any]) -> int:
    heads = int(sizes["num_attention_heads"])
    kv_heads = int(sizes.get("num_key_value_heads") or heads)
    head_dim = int(sizes.get("head_dim") or int(sizes["hidden_size"]) // heads)
    return kv_heads * head_dim * 2


def _state_numbers(sizes: Mapping[str, Any]) -> int:
    key_size = int(sizes["linear_num_key_heads"]) * int(sizes["linear_key_head_dim"])
    value_size = int(sizes["linear_num_value_heads"]) * int(sizes["linear_value_head_dim"])
    return int(sizes["linear_conv_kernel_dim"]) * (2 * key_size + value_size)


def _state_float32s(sizes: Mapping[str, Any]) -> int:
    value_size = int(sizes["linear_num_value_heads"]) * int(sizes["linear_value_head_dim"])
    return value_size * int(sizes["linear_key_head_dim"])


def choose_device(
    model_id: str,
    need_bytes: int,
    devices: Sequence[Device],
    readings: Mapping[int, DeviceReading],
    *,
    allowed: Sequence[int],
    reserve: Callable[[Device], MemoryReserve],
) -> int:
    """The index of the device with the most room among those where `need_bytes` fit, `allowed` ones only when given.

    Raises InsufficientCapacity with need and have of every device.
    """
    table: list[dict[str, Any]] = []
    fitting: list[tuple[int, int]] = []
    for device in devices:
        reading = readings.get(device.index)
        kept = reserve(device)
        free_bytes = reading.free_bytes if reading is not None else 0
        have_bytes = max(0, kept.usable_bytes(free_bytes))
        if allowed and device.index not in allowed:
            reason = "not among the devices asked for"
        elif reading is None:
            reason = "the device does not answer"
        elif need_bytes > kept.usable_bytes(device.total_bytes):
            reason = "too small even when empty"
        elif need_bytes > have_bytes:
            reason = "too little is free; unload something"
        else:
            fitting.append((have_bytes, -device.index))
            continue
        table.append(
            {
                "device": device.index,
                "name": device.name,
                "need_bytes": need_bytes,
                "have_bytes": have_bytes,
                "kept_free_bytes": kept.bytes_of(free_bytes),
                "total_bytes": device.total_bytes,
                "reason": reason,
            }
        )
    if fitting:
        return -max(fitting)[1]
    rows = "; ".join(
        f"device {row['device']} ({row['name']}) has {_gigabytes(row['have_bytes'])} of "
        f"{_gigabytes(row['total_bytes'])} to give, beside {_gigabytes(row['kept_free_bytes'])} kept free: "
        f"{row['reason']}"
        for row in table
    )
    raise InsufficientCapacity(
        f"{model_id} needs at least {_gigabytes(need_bytes)}, but {rows}", details={"devices": table}
    )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
