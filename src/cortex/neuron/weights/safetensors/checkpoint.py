"""A model directory of safetensors files, one or many."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cortex.neuron.weights.adapter import ADAPTER_KEY, WEIGHTS, adapter_folder, adapter_scale, adapter_tensor
from cortex.neuron.weights.directory import model_file, read_json
from cortex.neuron.weights.errors import FilesMissing, Malformed, TensorMissing
from cortex.neuron.weights.family_tensors import arranged
from cortex.neuron.weights.mapping import MappedFile
from cortex.neuron.weights.pooling_files import module_folder, pooling_of, weighted_modules, with_pooling
from cortex.neuron.weights.safetensors.arranged import stacked_expert
from cortex.neuron.weights.safetensors.header import parse_header
from cortex.neuron.weights.safetensors.published import assemble
from cortex.neuron.weights.stored import StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"


class SafetensorsCheckpoint:
    """See `checkpoint.Checkpoint`.

    `tensors` lists the stack of all experts of a layer where the files have one. `read` and `stored` also accept the
    name of one expert's matrix.
    """

    def __init__(self, directory: Path) -> None:
        """Open `directory` and check every header. Raises CheckpointError."""
        self.path = directory
        config = read_json(directory, "config.json")
        rest = {name: value for name, value in config.items() if name != ADAPTER_KEY}
        self._adapter = adapter_folder(directory, config)
        adapted = {} if self._adapter is None else {ADAPTER_KEY: adapter_scale(self._adapter)}
        self.config: Mapping[str, Any] = with_pooling({**rest, **adapted}, pooling_of(directory, config))
        self._files: list[MappedFile] = []
        try:
            self._published = assemble(directory, self.config, self._open_tensors())
            self._stored = arranged(self.config, self._published)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = _infos(self._stored)

    def as_published(self) -> SafetensorsCheckpoint:
        """The same files, with every tensor as they name and order it. The two share the files: close one of them."""
        other = copy.copy(self)
        other._stored, other.tensors = self._published, _infos(self._published)
        return other

    def read(self, name: str) -> torch.Tensor:
        from cortex.neuron.weights.decode import decode, mapped_bytes

        stored = self.stored(name)
        return decode(stored, mapped_bytes(stored))

    def stored(self, name: str) -> StoredTensor:
        stored = self._stored.get(name) or stacked_expert(self._stored, name)
        if stored is None:
            raise TensorMissing(f"{self.path} has no tensor {name!r}; check that config.json belongs to these weights")
        return stored

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _open_tensors(self) -> dict[str, StoredTensor]:
        modules = {
            f"{prefix}.{name}": tensor
            for folder, prefix in weighted_modules(self.path).items()
            for name, tensor in self._open_module(folder).items()
        }
        stored = {**self._open_root(), **modules}
        if self._adapter is not None:
            prefix = "" if "embed_tokens.weight" in stored else "model."
            added = self._open_file(WEIGHTS, self._adapter).items()
            stored |= {prefix + adapter_tensor(name): tensor for name, tensor in added}
        return stored

    def _open_root(self) -> dict[str, StoredTensor]:
        if not (self.path / _INDEX).exists():
            return self._open_file(self._only_file())
        shards: dict[str, dict[str, StoredTensor]] = {}
        stored: dict[str, StoredTensor] = {}
        for name, shard_name in _weight_map(self.path).items():
            if shard_name not in shards:
                shards[shard_name] = self._open_file(shard_name)
            try:
                stored[name] = shards[shard_name][name]
            except KeyError:
                raise Malformed(
                    f"{self.path / shard_name} lacks the tensor {name!r} that the index lists; download it again"
                ) from None
        return stored

    def _open_module(self, folder: str) -> dict[str, StoredTensor]:
        """The tensors of a module of its own, which comes after the pooling."""
        directory = module_folder(self.path, folder)
        if not (directory / _SINGLE).exists():
            raise FilesMissing(f"{directory} has no {_SINGLE}; its weights must be in safetensors")
        return self._open_file(_SINGLE, directory)

    def _open_file(self, name: str, directory: Path | None = None) -> dict[str, StoredTensor]:
        file = MappedFile(model_file(directory or self.path, name))
        self._files.append(file)
        return parse_header(file)

    def _only_file(self) -> str:
        found = sorted(path.name for path in self.path.glob("*.safetensors"))
        if _SINGLE in found:
            return _SINGLE
        if len(found) == 1:
            return found[0]
        raise FilesMissing(f"{self.path} has {len(found)} safetensors files but no {_INDEX}; download the index too")


def _infos(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo.of(stored) for name, stored in tensors.items()}


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise Malformed(f"{directory / _INDEX} has no weight_map from tensors to files; download it again")
    return weight_map
