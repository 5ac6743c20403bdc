"""A GGUF model in one or several files, with the tensor names and shapes of the hub, and its metadata in the format of
the hub's `config.json`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cortex.neuron.families.gguf import MAX_EXPERTS, MAX_HEADS, GGUFArchitecture
from cortex.neuron.families.registry import GGUF
from cortex.neuron.weights.delta_heads import DeltaHeads
from cortex.neuron.weights.directory import model_file
from cortex.neuron.weights.errors import Malformed, TensorMissing, Unsupported
from cortex.neuron.weights.family_tensors import arranged
from cortex.neuron.weights.gguf.encoders import encoder_config, gguf_pooling
from cortex.neuron.weights.gguf.keys import Keys
from cortex.neuron.weights.gguf.metadata import GGUFFile, GGUFTensor, HeaderBudget, parse_header
from cortex.neuron.weights.gguf.names import (
    LONG_FACTORS,
    ROPE_FACTORS,
    ROPE_TABLES,
    SHORT_FACTORS,
    expert_names,
    head_tensor,
    hub_name,
    is_expert_stack,
    layer_part,
)
from cortex.neuron.weights.gguf.recurrent import delta_tensors, recurrent_tensor
from cortex.neuron.weights.gguf.towers import projector_of, tower_tensors, whole_config
from cortex.neuron.weights.gguf.types import READABLE, GGMLType
from cortex.neuron.weights.mapping import MappedFile
from cortex.neuron.weights.pooling_files import with_pooling
from cortex.neuron.weights.stored import Adjustment, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch


_RECURRENT: Final = ("short_convolution", "mamba")
"""Mixers that only some layers have: what differs from layer to layer is in the options."""

_PART: Final = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
_MAX_PARTS: Final = 1024
_MAX_EXPERTS: Final = 1 << 12
_MAX_TENSORS: Final = 1 << 18


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The config of the model in the hub's format. Raises CheckpointError if it is incomplete or not supported."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF:
        raise Unsupported(
            f"{file.path} has the architecture {str(name)[:80]!r}; supported in GGUF: {', '.join(sorted(GGUF))}"
        )
    architecture, family = GGUF[name]
    keys = Keys(file, name)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise Malformed(f"{file.path} has no token_embd.weight; is the model complete?")
    hidden_size = keys.count("embedding_length")
    pooling = gguf_pooling(file, architecture, hidden_size)
    if family.is_encoder:
        config = encoder_config(file, family.model_types[0], keys)
        return with_pooling(config | (architecture.options(keys, config) if architecture.options else {}), pooling)

    num_layers = _num_layers(file, keys)
    num_heads = (
        max(keys.counts("attention.head_count", num_layers))
        if architecture.heads_by_layer
        else keys.count("attention.head_count")
    )
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim or (rotary_dim < head_dim and not architecture.rotates_part):
        raise Unsupported(f"{file.path} rotates {rotary_dim} of {head_dim} dimensions, which is not supported in GGUF")
    rope_theta = keys.number("rope.freq_base", 10000.0)
    varies = architecture.sizes_by_layer or architecture.mixer in _RECURRENT
    if not architecture.is_mixture and not varies and file.metadata.get(f"{name}.expert_count"):
        raise Unsupported(f"{file.path} is a {name} mixture of experts, which is not supported in GGUF")

    config = {
        "model_type": family.model_types[0],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(keys, architecture, num_layers, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", architecture.norm_eps),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling(file, name, rope_theta, rotary_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": "bfloat16",
    }
    if keys.has("nextn_predict_layers") and architecture.head:
        config["num_nextn_predict_layers"] = keys.count("nextn_predict_layers")
    if architecture.is_mixture:
        config |= _mixture(keys)
    elif architecture.mixer not in _RECURRENT:
        config["intermediate_size"] = _of_first_layer(keys, architecture, "feed_forward_length")
    if sections := file.metadata.get(f"{name}.rope.dimension_sections"):
        config["mrope_section"] = list(sections)[:3]
    if architecture.rotates_part:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if architecture.mixer == "gated_delta":
        config |= _gated_delta(keys)
    if architecture.options is not None:
        config |= architecture.options(keys, config)
    return with_pooling(config, pooling)


def delta_heads(config: Mapping[str, Any], architecture: GGUFArchitecture) -> DeltaHeads | None:
    """The gated delta nets of a config that `config_of` returned; None: the model has none."""
    if "linear_num_key_heads" not in config:
        return None
    return DeltaHeads(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        is_tiled=architecture.is_tiled,
    )


def _num_layers(file: GGUFFile, keys: Keys) -> int:
    """Without the layers that only predict further tokens, which come last."""
    num_layers = keys.count("block_count")
    extra = keys.count("nextn_predict_layers") if keys.has("nextn_predict_layers") else 0
    if extra >= num_layers:
        raise Malformed(f"{file.path} has {num_layers} layers, {extra} of them for prediction; convert the model again")
    return num_layers - extra


def _num_kv_heads(keys: Keys, architecture: GGUFArchitecture, num_layers: int, num_heads: int) -> int:
    if architecture.mixer in _RECURRENT:
        return keys.count_of_layers("attention.head_count_kv", num_layers, num_heads)
    return _of_first_layer(keys, architecture, "attention.head_count_kv", num_heads)


def _of_first_layer(keys: Keys, architecture: GGUFArchitecture, name: str, default: int | None = None) -> int:
    return keys.counts(name, 1, default)[0] if architecture.sizes_by_layer else keys.count(name, default)


def _mixture(keys: Keys) -> dict[str, Any]:
    shared = "expert_shared_feed_forward_length"
    return {
        "intermediate_size": keys.count("feed_forward_length", keys.count("expert_feed_forward_length")),
        "num_experts": keys.count("expert_count", limit=MAX_EXPERTS),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **({"shared_expert_intermediate_size": keys.count(shared)} if keys.has(shared) else {}),
    }


def _gated_delta(keys: Keys) -> dict[str, Any]:
    value_heads, inner = keys.count("ssm.time_step_rank", limit=MAX_HEADS), keys.count("ssm.inner_size")
    key_heads = keys.count("ssm.group_count", limit=MAX_HEADS)
    if inner % value_heads or value_heads % key_heads:
        raise keys.malformed(
            f"has {inner} values in {value_heads} heads for {key_heads} key heads, which do not divide"
        )
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "full_attention_interval": keys.count("full_attention_interval", 4),
    }


# The values of the published models, for heads that are too small for the table to determine them.
_LOW_FREQ_FACTOR: Final = 1.0
_HIGH_FREQ_FACTOR: Final = 4.0
_ORIGINAL_POSITIONS: Final = 8192
_TOLERANCE: Final = 1e-3
_STANDS_STILL: Final = 1e20
"""Pairs of dimensions that are divided by more do not turn."""
_YARN_SETTINGS: Final = {
    "yarn_attn_factor": ("attention_factor",),
    "yarn_beta_fast": ("beta_fast",),
    "yarn_beta_slow": ("beta_slow",),
    "yarn_log_multiplier": ("mscale", "mscale_all_dim"),
}


def rope_scaling(file: GGUFFile, architecture: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The hub's `rope_scaling` for the file, None if positions are not scaled; raises CheckpointError."""
    factors = _factors(file, head_dim, ROPE_FACTORS)
    if factors is not None and max(factors) >= _STANDS_STILL:
        return _proportional(file, factors)
    if factors is not None and any(factor != 1.0 for factor in factors):
        return _llama3(file, factors, theta, head_dim)
    short, long = (_factors(file, head_dim, name) for name in (SHORT_FACTORS, LONG_FACTORS))
    if short is not None and long is not None:
        scale = file.metadata.get(f"{architecture}.rope.scaling.attn_factor")
        longrope: dict[str, Any] = {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long)}
        return longrope | ({"attention_factor": scale} if isinstance(scale, float) else {})

    def key(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.rope.scaling.{name}", default)

    kind, factor = key("type", "none"), key("factor", 0.0)
    if kind == "none" or not isinstance(factor, float) or factor in (0.0, 1.0):
        return None
    if kind not in ("linear", "yarn") or not 0 < factor < math.inf:
        raise Unsupported(f"{file.path} scales positions by {str(kind)[:40]!r} × {factor}, which is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if isinstance(original := key("original_context_length"), int):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        for name, hub_names in _YARN_SETTINGS.items():
            if isinstance(value := key(name), float) and 0 < value < math.inf:
                scaling |= dict.fromkeys(hub_names, value)
    return scaling


def _factors(file: GGUFFile, head_dim: int, name: str) -> tuple[float, ...] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type is not GGMLType.F32 or tensor.shape != (head_dim // 2,):
        raise Malformed(f"{file.path}: {name} does not match heads of size {head_dim}; convert the model again")
    with file.path.open("rb") as raw:
        raw.seek(tensor.offset)
        factors = struct.unpack(f"<{head_dim // 2}f", raw.read(tensor.num_bytes))
    lowest = 1 if name == ROPE_FACTORS else 1e-3
    if not all(lowest <= factor < math.inf for factor in factors):
        raise Malformed(f"{file.path}: {name} holds a divisor below {lowest} or not finite; convert the model again")
    return factors


def _proportional(file: GGUFFile, factors: tuple[float, ...]) -> dict[str, Any]:
    """The first pairs of dimensions turn, the rest do not. Raises Unsupported for any other table."""
    turning = sum(factor < _STANDS_STILL for factor in factors)
    if turning == 0 or any(factor != 1.0 for factor in factors[:turning]):
        raise Unsupported(f"{file.path}: {ROPE_FACTORS} is not a proportional scaling; use a safetensors model")
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}


def _llama3(file: GGUFFile, factors: tuple[float, ...], theta: float, head_dim: int) -> dict[str, Any]:
    """Fit Llama 3 scaling to the table. Raises Unsupported if the fit does not reproduce the table.

    Short wavelengths have divisor 1, long ones `factor`. Between them 1/divisor is linear in the number of waves that
    fit the original context. Two points determine the slope and the offset of that line. Only ratios matter, so the
    low end is set to 1.
    """
    frequencies = [theta ** (-2 * index / head_dim) for index in range(head_dim // 2)]
    factor = float(f"{max(factors):.7g}")
    between = [
        (frequency / (2 * math.pi), (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for frequency, divisor in zip(frequencies, factors, strict=True)
        if 1.0 < divisor < factor * (1 - 1e-6)
    ]
    high, original = _HIGH_FREQ_FACTOR, float(_ORIGINAL_POSITIONS)
    if len(between) >= 2:
        (first_waves, first_blend), (last_waves, last_blend) = between[0], between[-1]
        slope = (first_blend - last_blend) / (first_waves - last_waves)
        root = last_blend - slope * last_waves
        if slope > 0 and root < 0:
            high = _snapped(1 - 1 / root)
            original = _snapped(slope * (high - _LOW_FREQ_FACTOR))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original) if original.is_integer() else original,
    }
    expected = [_divisor(frequency, factor, high, original) for frequency in frequencies]
    if any(abs(a - b) > _TOLERANCE * b for a, b in zip(factors, expected, strict=True)):
        raise Unsupported(f"{file.path}: {ROPE_FACTORS} is not a Llama 3 scaling; use a safetensors model")
    return scaling


def _snapped(value: float) -> float:
    """`value`, rounded to an integer if float32 rounding explains the difference."""
    return float(round(value)) if math.isclose(value, round(value), rel_tol=1e-5) else value


def _divisor(frequency: float, factor: float, high: float, original: float) -> float:
    waves = original * frequency / (2 * math.pi)
    if waves > high:
        return 1.0
    if waves < _LOW_FREQ_FACTOR:
        return factor
    blend = (waves - _LOW_FREQ_FACTOR) / (high - _LOW_FREQ_FACTOR)
    return 1 / ((1 - blend) / factor + blend)


class GGUFCheckpoint:
    """See `checkpoint.Checkpoint`. Quantised tensors are read as float32.

    `tensors` lists every expert separately, like safetensors models. `read` and `stored` also accept the name of the
    stack of all experts of a layer, `model.layers.N.mlp.experts.gate_proj.weight`, of shape `[experts, out, in]`.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` and the following parts of a split model, and check all headers; raises CheckpointError."""
        self.path = path
        self._mapped: list[MappedFile] = []
        self._stored: dict[str, StoredTensor] = {}
        self._stacks: dict[str, StoredTensor] = {}
        try:
            budget = HeaderBudget()
            head = self._open(path, budget)
            parts = [head, *(self._open(part, budget) for part in _following_parts(head))]
            whole = replace(head, tensors=_merged_tensors(parts))
            self.config: Mapping[str, Any] = config_of(whole)
            self._architecture = GGUF[head.metadata["general.architecture"]].architecture
            self._num_blocks: int = head.metadata[f"{self._architecture.name}.block_count"]
            for file, mapped in zip(parts, self._mapped, strict=True):
                for tensor in file.tensors.values():
                    self._register(mapped, tensor)
            self._stored = arranged(self.config, self._stored)
            if (projector := projector_of(path)) is not None:
                self._add_tower(self._open(projector, budget), self._mapped[-1])
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {name: TensorInfo.of(stored) for name, stored in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        from cortex.neuron.weights.decode import decode, mapped_bytes

        stored = self.stored(name)
        return decode(stored, mapped_bytes(stored))

    def stored(self, name: str) -> StoredTensor:
        stored = self._stored.get(name) or self._stacks.get(name)
        if stored is None:
            raise TensorMissing(f"{self.path} has no tensor {name!r}; is the model complete?")
        return stored

    def close(self) -> None:
        for mapped in self._mapped:
            mapped.close()

    def _open(self, path: Path, budget: HeaderBudget) -> GGUFFile:
        mapped = MappedFile(path)
        self._mapped.append(mapped)
        return parse_header(mapped, budget)

    def _add_tower(self, file: GGUFFile, mapped: MappedFile) -> None:
        """Makes this the checkpoint of the model with its tower, if the file has the tower of such a model."""
        config = whole_config(self.config, file)
        if config is None:
            return
        self.config = config
        self._stored = {_with_tower(name): stored for name, stored in self._stored.items()}
        self._stacks = {_with_tower(name): stored for name, stored in self._stacks.items()}
        for name, stored in tower_tensors(file, mapped):
            self._add(name, stored)

    def _register(self, mapped: MappedFile, tensor: GGUFTensor) -> None:
        if tensor.name in ROPE_TABLES:
            return
        if tensor.type.name not in READABLE:
            raise Unsupported(
                f"{self.path}: {tensor.name[:200]} is in {tensor.type.name}, which is not supported; choose a file in "
                f"one of {', '.join(READABLE)}"
            )
        stored = StoredTensor(
            mapped, tensor.offset, tensor.shape, tensor.type.name, tensor.num_bytes, name=tensor.name[:200]
        )
        heads, place = delta_heads(self.config, self._architecture), layer_part(tensor.name)
        if place is not None:
            layer, part = place
            if layer >= self.config["num_hidden_layers"]:
                self._register_head(layer, part, tensor, stored)
                return
            found = delta_tensors(part, stored, heads) if heads is not None else None
            if (recurrent := recurrent_tensor(self._architecture.mixer, part, stored)) is not None:
                found = dict([recurrent])
            if found is not None:
                for name, made in found.items():
                    self._add(f"model.layers.{layer}.{name}", made)
                return
        self._register_as(hub_name(tensor.name, self._architecture.name), tensor, stored)

    def _register_as(self, name: str, tensor: GGUFTensor, stored: StoredTensor) -> None:
        if is_expert_stack(name):
            self._add_experts(name, stored)
            return
        norms = self._architecture.norms
        is_plain = norms == "plain" or (norms == "plus_one_but_last" and name == "model.norm.weight")
        if not is_plain and (name.endswith("norm.weight") or ".pre_fc_norm_" in name):
            stored = replace(stored, adjustment=Adjustment.PLUS_ONE)
        if name.endswith((".shared_expert_gate.weight", "cls.output.weight")) and len(stored.shape) == 1:
            stored = replace(stored, shape=(1, *stored.shape))
        self._add(name, replace(stored, interleaved_rows=self._interleaved_rows(name, tensor)))

    def _add(self, name: str, stored: StoredTensor) -> None:
        if name in self._stored:
            raise Malformed(f"{self.path}: {stored.name} is the second tensor for {name}; convert the model again")
        if len(self._stored) == _MAX_TENSORS:
            raise Malformed(f"{self.path} has more than {_MAX_TENSORS} tensors, experts counted; convert it again")
        self._stored[name] = stored

    def _register_head(self, layer: int, part: str, tensor: GGUFTensor, stored: StoredTensor) -> None:
        """Layers for prediction come after the others; the first of them is known. A layer beyond them contradicts the
        metadata."""
        if layer >= self._num_blocks:
            raise Malformed(
                f"{self.path}: {tensor.name[:200]} is in layer {layer} of {self._num_blocks}; convert the model again"
            )
        if layer == self.config["num_hidden_layers"] and self._architecture.head:
            self._register_as(head_tensor(tensor.name, self._architecture, layer, part), tensor, stored)

    def _add_experts(self, name: str, stored: StoredTensor) -> None:
        """All experts of a layer in one tensor, of which each is a part."""
        names = expert_names(name)
        if len(stored.shape) != 3 or stored.shape[0] > _MAX_EXPERTS or stored.shape[1] % len(names):
            raise Malformed(f"{self.path}: {stored.name} has the shape {stored.shape}; convert the model again")
        experts, rows, columns = stored.shape
        self._stacks[name] = stored
        num_bytes = stored.num_bytes // (experts * len(names))
        part = replace(stored, shape=(rows // len(names), columns), num_bytes=num_bytes)
        for expert in range(experts):
            for number, pattern in enumerate(names):
                offset = stored.offset + (expert * len(names) + number) * num_bytes
                self._add(pattern.format(expert), replace(part, offset=offset))

    def _interleaved_rows(self, name: str, tensor: GGUFTensor) -> int:
        """The rows per head, if GGUF stores them interleaved: some converters put rotary pairs side by side."""
        if not self._architecture.is_interleaved or not re.search(r"\.self_attn\.[qk]_proj\.", name):
            return 0
        head_dim: int = self.config["head_dim"]
        if tensor.shape[0] % head_dim or head_dim % 2:
            raise Malformed(
                f"{self.path}: {tensor.name} cannot be split into heads of {head_dim} rows; convert the model again"
            )
        return head_dim


def _with_tower(name: str) -> str:
    """The name of a tensor of the language model in a checkpoint that also has a tower."""
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _following_parts(head: GGUFFile) -> list[Path]:
    count = head.metadata.get("split.count", 1)
    if count in (0, 1):
        return []
    match = _PART.fullmatch(head.path.name)
    if match is None or not isinstance(count, int) or count > _MAX_PARTS or int(match[2]) != count:
        raise Malformed(f"{head.path} is part of a split model; name its first part, …-00001-of-{count!s:.5}.gguf")
    return [
        model_file(head.path.parent, f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)
    ]


def _merged_tensors(parts: list[GGUFFile]) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        if len(parts) > 1 and (place := part.metadata.get("split.no", number)) != number:
            raise Malformed(
                f"{part.path} says that it is part {str(place)[:20]}, not {number}; download the parts again"
            )
        if twice := tensors.keys() & part.tensors.keys():
            raise Malformed(f"{part.path} repeats the tensor {min(twice)!r}; download the parts again")
        tensors |= part.tensors
    return tensors
