"""Everything that can be known before memory is touched: are the files whole, is the family supported, is the
quantisation what was asked for, does it fit. Reads headers only, imports no torch; run on a thread: disks may be slow.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex.neuron.device.discovery import DeviceReading
from cortex.neuron.models.registry import SUPPORTED, UnsupportedModel, refuse_quantised
from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.errors import CheckpointError
from cortex.neuron.weights.stored import TensorInfo
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node import Device

CACHED_CONTEXTS = 4
"""Full contexts for which a model gets cache on a GPU unless it is told otherwise; the rest stays for other models."""
_DENSE_FORMATS = frozenset({"F64", "F32", "F16", "BF16"})
_MIN_KV_TOKENS = 256
"""Less cache than this is of no use to anybody."""
_MIXTURE = re.compile(r"_(?:XS|S|M|L|XL)$")
"""`Q4_K_M` says how Q4_K is mixed with other formats; the tensors themselves only know of Q4_K."""
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
    least_weight_bytes: int
    """What the weights take at the very least; a refusal is based on it, so that nothing that fits is refused."""
    most_weight_bytes: int
    """What they take if every quantised tensor is unpacked; a ceiling is based on it."""
    kv_token_bytes: int

    @property
    def need_bytes(self) -> int:
        """The least memory with which the model can answer."""
        return self.least_weight_bytes + self.kv_token_bytes * min(_MIN_KV_TOKENS, self.context_tokens)

    def ceiling_bytes(self, context_tokens: int | None) -> int:
        """What the model should take of a GPU that it may share: its weights and a few full contexts."""
        context_tokens = min(context_tokens or self.context_tokens, self.context_tokens)
        return int(self.most_weight_bytes * 1.02) + CACHED_CONTEXTS * context_tokens * self.kv_token_bytes


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
        refuse_quantised(config)
    except UnsupportedModel as error:
        raise LoadFailed(f"{name} cannot be loaded: {error}") from error
    # Models with more than text keep the text part's sizes one level down.
    sizes: Mapping[str, Any] = config.get("text_config") or config
    kept = [tensor for source, tensor in tensors if not source.startswith(_LEFT_OUT)]
    try:
        return ModelFacts(
            path=path,
            family=family,
            quant=_stored_quant(kept),
            context_tokens=int(sizes["max_position_embeddings"]),
            least_weight_bytes=sum(_least_bytes(tensor) for tensor in kept),
            most_weight_bytes=sum(_most_bytes(tensor) for tensor in kept),
            kv_token_bytes=_kv_token_bytes(sizes),
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


def _least_bytes(tensor: TensorInfo) -> int:
    elements: int = math.prod(tensor.shape)
    return min(elements * 2, tensor.num_bytes)


def _most_bytes(tensor: TensorInfo) -> int:
    return max(math.prod(tensor.shape) * 2, tensor.num_bytes if tensor.dtype not in _DENSE_FORMATS else 0)


def _kv_token_bytes(sizes: Mapping[str, Any]) -> int:
    """Keys and values of one token over the layers that keep them, in 16-bit numbers."""
    layer_types = sizes.get("layer_types")
    if isinstance(layer_types, list):
        num_layers: int = sum(kind != "linear_attention" for kind in layer_types)
    else:
        num_layers = int(sizes["num_hidden_layers"]) // int(sizes.get("full_attention_interval") or 1)
    heads = int(sizes["num_attention_heads"])
    kv_heads = int(sizes.get("num_key_value_heads") or heads)
    head_dim = int(sizes.get("head_dim") or int(sizes["hidden_size"]) // heads)
    return num_layers * kv_heads * head_dim * 2 * 2


def choose_device(
    model_id: str,
    facts: ModelFacts,
    devices: Sequence[Device],
    readings: Mapping[int, DeviceReading],
    *,
    allowed: Sequence[int],
    min_free_bytes: int,
) -> int:
    """The index of the device with the most room among those where it fits, `allowed` ones only when given.

    Raises InsufficientCapacity with need and have of every device.
    """
    need_bytes = facts.need_bytes + min_free_bytes
    table: list[dict[str, Any]] = []
    fitting: list[tuple[int, int]] = []
    for device in devices:
        reading = readings.get(device.index)
        free_bytes = reading.free_bytes if reading is not None else 0
        if allowed and device.index not in allowed:
            reason = "not among the devices asked for"
        elif reading is None:
            reason = "the device does not answer"
        elif need_bytes > device.total_bytes:
            reason = "too small even when empty"
        elif need_bytes > free_bytes:
            reason = "too little is free; unload something"
        else:
            fitting.append((free_bytes, -device.index))
            continue
        table.append(
            {
                "device": device.index,
                "name": device.name,
                "need_bytes": need_bytes,
                "have_bytes": free_bytes,
                "total_bytes": device.total_bytes,
                "reason": reason,
            }
        )
    if fitting:
        return -max(fitting)[1]
    rows = "; ".join(
        f"device {row['device']} ({row['name']}) has {_gigabytes(row['have_bytes'])} of "
        f"{_gigabytes(row['total_bytes'])} free: {row['reason']}"
        for row in table
    )
    raise InsufficientCapacity(
        f"{model_id} needs at least {_gigabytes(need_bytes)} ({_gigabytes(facts.least_weight_bytes)} weights, "
        f"{_gigabytes(min_free_bytes)} kept free), but {rows}",
        details={"devices": table},
    )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
