"""A GGUF model in one or several files, with the tensor names and shapes of the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cortex.neuron.families.registry import GGUF
from cortex.neuron.weights.directory import model_file
from cortex.neuron.weights.errors import Malformed, TensorMissing, Unsupported
from cortex.neuron.weights.family_tensors import arranged
from cortex.neuron.weights.gguf.config import config_of, delta_heads
from cortex.neuron.weights.gguf.metadata import GGUFFile, GGUFTensor, HeaderBudget, parse_header
from cortex.neuron.weights.gguf.names import (
    ROPE_TABLES,
    expert_names,
    head_tensor,
    hub_name,
    is_expert_stack,
    layer_part,
)
from cortex.neuron.weights.gguf.recurrent import delta_tensors, recurrent_tensor
from cortex.neuron.weights.gguf.towers import projector_of, tower_tensors, whole_config
from cortex.neuron.weights.gguf.types import READABLE
from cortex.neuron.weights.mapping import MappedFile
from cortex.neuron.weights.stored import Adjustment, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

_PART: Final = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
_MAX_PARTS: Final = 1024
_MAX_EXPERTS: Final = 1 << 12
_MAX_TENSORS: Final = 1 << 18


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
