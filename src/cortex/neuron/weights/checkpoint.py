"""One interface for every format of model files: a config, a table of tensors, and a way to read them.

Opening a checkpoint needs no torch and reads no weights, so that a node can size a model before it makes room for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from cortex.neuron.weights.errors import FilesMissing
from cortex.neuron.weights.gguf.checkpoint import GGUFCheckpoint
from cortex.neuron.weights.safetensors.checkpoint import SafetensorsCheckpoint
from cortex.neuron.weights.stored import StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "StoredTensor", "TensorInfo", "content_sample", "open_checkpoint"]

_SAMPLED_TENSORS: Final = 256
_SAMPLED_BYTES: Final = 64
_TEXT_FILES: Final = ("tokenizer", "tekken", "vocab", "merges", "added_tokens", "special_tokens_map", "chat_template")
_PIECES: Final = 64
_PIECE_BYTES: Final = 4096
"""Each text is sampled in this many pieces: a tokenizer has megabytes, a template some thousand bytes."""


class Checkpoint(Protocol):
    """A model's files, opened and checked. Safe to use from several threads."""

    path: Path
    config: Mapping[str, Any]
    """In the format of the hub's `config.json`, for every file format."""
    tensors: Mapping[str, TensorInfo]
    """By the hub's tensor names."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU: a view of the mapped file in its stored dtype, or float32 if it is quantised.

        Callers must not write to it. Raises TensorMissing.
        """

    def stored(self, name: str) -> StoredTensor:
        """The location of the tensor, for callers that copy bytes themselves. Raises TensorMissing."""

    def close(self) -> None:
        """Close the files; idempotent. Tensors that were read stay valid."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory (safetensors with `config.json`, or GGUF) or a `.gguf` file; raises CheckpointError."""
    path = Path(path).expanduser()
    if path.is_dir():
        if any(path.glob("*.safetensors")):
            return SafetensorsCheckpoint(path)
        return GGUFCheckpoint(_only_gguf(path))
    if not path.exists():
        raise FilesMissing(f"{path} does not exist; check the path")
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint(path.parent)
    return GGUFCheckpoint(path)


def content_sample(checkpoint: Checkpoint) -> str:
    """A digest of bytes from matrices and vectors all over the weights, and of the tokenizer and the template:
    checkpoints that share a config differ in it. Reads little, because a node does so with every model that it lists.
    Raises CheckpointError."""
    matrices, vectors = list[str](), list[str]()
    for name, info in sorted(checkpoint.tensors.items(), key=itemgetter(0)):
        (matrices if len(info.shape) > 1 else vectors).append(name)
    sampled = hashlib.sha256()
    for names in (matrices, vectors):
        for name in names[:: -(-len(names) // _SAMPLED_TENSORS) or 1]:
            stored = checkpoint.stored(name)
            piece = bytearray(min(_SAMPLED_BYTES, stored.num_bytes))
            # From the middle: embeddings begin with rows of tokens that are never trained.
            stored.file.read_into(memoryview(piece), stored.offset + (stored.num_bytes - len(piece)) // 2)
            sampled.update(name.encode() + b"\0" + piece)
    for text in _text_pieces(checkpoint):
        sampled.update(text)
    return sampled.hexdigest()


def _text_pieces(checkpoint: Checkpoint) -> Iterator[bytes]:
    """Of what comes before the first weight of a GGUF file, and of the text files of a directory."""
    if checkpoint.path.is_dir():
        found = [
            path for path in sorted(checkpoint.path.iterdir()) if path.name.startswith(_TEXT_FILES) and path.is_file()
        ]
        places = [(path.name, path, path.stat().st_size) for path in found]
    else:
        places = [
            ("", checkpoint.path, min((checkpoint.stored(name).offset for name in checkpoint.tensors), default=0))
        ]
    for name, path, size in places:
        yield f"{name} {size}\0".encode()
        with path.open("rb") as file:
            for start in range(0, size, max(_PIECE_BYTES, size // _PIECES)):
                file.seek(start)
                yield file.read(min(_PIECE_BYTES, size - start))


def _only_gguf(directory: Path) -> Path:
    """The only GGUF model in `directory`; the first part of a split model."""
    found = sorted(
        path
        for path in directory.glob("*.gguf")
        if not path.name.startswith("mmproj") and ("-of-" not in path.name or "-00001-of-" in path.name)
    )
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise FilesMissing(f"{directory} holds several GGUF models; name one of them: {names}")
    raise FilesMissing(f"{directory} holds no *.safetensors and no *.gguf file; is it a model directory?")
