"""A GGUF model in one or several files, with the tensor names and shapes of the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cortex.neuron.weights.directory import model_file
from cortex.neuron.weights.errors import CheckpointError, Malformed, TensorMissing
from cortex.neuron.weights.gguf.config import config_of, generation_config_of
from cortex.neuron.weights.gguf.metadata import GGUFFile, GGUFTensor, parse_header
from cortex.neuron.weights.gguf.names import ROPE_FACTORS, expert_name, hub_name, is_expert_stack
from cortex.neuron.weights.mapping import MappedFile
from cortex.neuron.weights.stored import StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

_PART: Final = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
_MAX_PARTS: Final = 1024
_MAX_EXPERTS: Final = 1 << 12


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
            head = self._open(path)
            parts = [head, *(self._open(part) for part in _following_parts(head))]
            whole = replace(head, tensors=_merged_tensors(parts))
            self.config: Mapping[str, Any] = config_of(whole)
            self.generation_config: Mapping[str, Any] = generation_config_of(head)
            for file, mapped in zip(parts, self._mapped, strict=True):
                for tensor in file.tensors.values():
                    self._register(mapped, tensor)
        except CheckpointError:
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

    def _open(self, path: Path) -> GGUFFile:
        mapped = MappedFile(path)
        self._mapped.append(mapped)
        return parse_header(mapped)

    def _register(self, mapped: MappedFile, tensor: GGUFTensor) -> None:
        if tensor.name == ROPE_FACTORS:
            return
        name = hub_name(tensor.name)
        stored = StoredTensor(
            mapped,
            tensor.offset,
            tensor.shape,
            tensor.type.name,
            tensor.num_bytes,
            self._interleaved_rows(name, tensor),
        )
        if not is_expert_stack(name):
            self._stored[name] = stored
            return
        if len(stored.shape) != 3 or stored.shape[0] > _MAX_EXPERTS:
            raise Malformed(f"{self.path}: {tensor.name} has the shape {stored.shape}; convert the model again")
        self._stacks[name] = stored
        num_bytes = stored.num_bytes // stored.shape[0]
        for expert in range(stored.shape[0]):
            self._stored[expert_name(name, expert)] = StoredTensor(
                mapped, stored.offset + expert * num_bytes, stored.shape[1:], stored.format, num_bytes
            )

    def _interleaved_rows(self, name: str, tensor: GGUFTensor) -> int:
        """The rows per head, if GGUF stores them interleaved: in Llama, both rows of a rotary pair are adjacent."""
        if self.config["model_type"] != "llama" or not re.search(r"\.self_attn\.[qk]_proj\.", name):
            return 0
        head_dim: int = self.config["head_dim"]
        if tensor.shape[0] % head_dim or head_dim % 2:
            raise Malformed(
                f"{self.path}: {tensor.name} cannot be split into heads of {head_dim} rows; convert the model again"
            )
        return head_dim


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
    for part in parts:
        if twice := tensors.keys() & part.tensors.keys():
            raise Malformed(f"{part.path} repeats the tensor {min(twice)!r}; download the parts again")
        tensors |= part.tensors
    return tensors
