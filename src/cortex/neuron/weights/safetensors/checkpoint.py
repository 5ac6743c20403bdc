"""A model directory of safetensors files, one or many."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cortex.neuron.weights.adapter import ADAPTER_KEY, WEIGHTS, adapter_folder, adapter_scale, adapter_tensor
from cortex.neuron.weights.directory import model_file, parse_json_object, read_json
from cortex.neuron.weights.errors import FilesMissing, Malformed, TensorMissing, Unsupported
from cortex.neuron.weights.family_tensors import arranged
from cortex.neuron.weights.mapping import MappedFile
from cortex.neuron.weights.pooling_files import module_folder, pooling_of, weighted_modules, with_pooling
from cortex.neuron.weights.safetensors.arranged import stacked_expert
from cortex.neuron.weights.safetensors.published import assemble
from cortex.neuron.weights.stored import StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

# A header takes about 130 bytes per tensor, so this allows more than 100,000 tensors.
_MAX_HEADER_BYTES: Final = 16 << 20
_MAX_DIMENSIONS: Final = 16

_ITEM_BYTES: Final = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


def parse_header(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors of one file by name. Together they cover its data exactly. Raises CheckpointError."""
    if file.num_bytes < 8:
        raise Malformed(f"{file.path} is too short to be a safetensors file; download it again")
    head = file.header(8 + _MAX_HEADER_BYTES)
    header_bytes = int.from_bytes(head[:8], "little")
    data_start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or data_start > file.num_bytes:
        raise Malformed(
            f"{file.path} is not a valid safetensors file: its header length is {header_bytes} bytes; download it again"
        )
    table = parse_json_object(head[8:data_start], file.path)
    tensors = {name: _tensor(file, data_start, name, entry) for name, entry in table.items() if name != "__metadata__"}
    _check_cover(file, data_start, tensors)
    return tensors


def _tensor(file: MappedFile, data_start: int, name: str, entry: Any) -> StoredTensor:
    def malformed(reason: str) -> Malformed:
        return Malformed(f"{file.path}: tensor {name[:200]!r} {reason}; download it again")

    if not isinstance(entry, dict):
        raise malformed("has no description")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise malformed("has no dtype")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise malformed("has an impossible shape")
    if not isinstance(span, list) or len(span) != 2 or not all(map(_is_count, span)):
        raise malformed("has impossible offsets")
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise Unsupported(f"{file.path}: tensor {name[:200]!r} has the unknown dtype {dtype[:40]!r}")
    start, end = span
    num_bytes = math.prod(shape) * item_bytes
    if end - start != num_bytes:
        raise malformed(f"spans {end - start} bytes, its shape and dtype need {num_bytes}")
    if data_start + end > file.num_bytes:
        raise malformed(f"ends at byte {data_start + end} of a file with {file.num_bytes}: the file is truncated")
    return StoredTensor(file, data_start + start, tuple(shape), dtype, num_bytes, name=name[:200])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_cover(file: MappedFile, data_start: int, tensors: dict[str, StoredTensor]) -> None:
    """Check that there are no overlaps and no gaps: the format forbids both, so a model file holds no other data."""
    position = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != position:
            raise Malformed(
                f"{file.path}: tensor {name[:200]!r} does not start where the previous one ends; download it again"
            )
        position += tensor.num_bytes
    if position != file.num_bytes:
        raise Malformed(f"{file.path} has {file.num_bytes - position} bytes outside of all tensors; download it again")


_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_EMBEDDING: Final = re.compile(r"(^|\.)(embed_tokens|embed_in|word_embeddings|wte)\.weight")
_PIECE_BYTES: Final = 1 << 18


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
        described = with_pooling({**rest, **adapted}, pooling_of(directory, config))
        self._files: list[MappedFile] = []
        try:
            self._published = assemble(directory, described, self._open_tensors())
            self._stored = arranged(described, self._published)
            self.config: Mapping[str, Any] = _with_own_head(described, self._stored)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = _infos(self._stored)

    def as_published(self) -> SafetensorsCheckpoint:
        """The same files, with every tensor as they name and order it. The two share the files: close one of them."""
        other = copy.copy(self)
        other._stored = self._published  # noqa: SLF001 - of the same class
        other.tensors = _infos(self._published)
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


def _with_own_head(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Mapping[str, Any]:
    """The config of a model whose files have an output matrix: the embedding is not used for it, whatever the config
    says. Configs of models with a vision tower often leave it out, and mean what a library once took for it.

    A stored copy of the embedding is no output matrix of its own (Qwen3 0.6B and 1.7B have one): the config holds.
    """
    head = tensors.get("lm_head.weight")
    embeddings = [tensor for name, tensor in tensors.items() if _EMBEDDING.search(name)]
    if head is None or (embeddings and all(_is_copy(head, embedding) for embedding in embeddings)):
        return config
    rest = {name: value for name, value in config.items() if name != "tie_embedding"}  # LFM2's name of the option
    return {**rest, "tie_word_embeddings": False}


def _is_copy(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two dense tensors have the same bytes. Of tensors that differ, little is read. Raises CheckpointError."""
    if (one.shape, one.format, one.scales, other.scales) != (other.shape, other.format, None, None):
        return False
    mine, others = bytearray(_PIECE_BYTES), bytearray(_PIECE_BYTES)
    for first in range(0, one.num_bytes, _PIECE_BYTES):
        num_bytes = min(_PIECE_BYTES, one.num_bytes - first)
        one.file.read_into(memoryview(mine)[:num_bytes], one.offset + first)
        other.file.read_into(memoryview(others)[:num_bytes], other.offset + first)
        if mine != others:  # after a last, shorter piece both have the bytes of the piece before it, which are equal
            return False
    return True


def _infos(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo.of(stored) for name, stored in tensors.items()}


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise Malformed(f"{directory / _INDEX} has no weight_map from tensors to files; download it again")
    return weight_map
