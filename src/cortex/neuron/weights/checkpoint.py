"""One face for every kind of model file: a config, a table of tensors, and a way to read them.

Opening costs no torch and reads no weight, so that a node can judge a model before it makes room for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cortex.neuron.weights.errors import FilesMissing
from cortex.neuron.weights.gguf.checkpoint import GGUFCheckpoint
from cortex.neuron.weights.safetensors.checkpoint import SafetensorsCheckpoint
from cortex.neuron.weights.stored import StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "StoredTensor", "TensorInfo", "open_checkpoint"]


class Checkpoint(Protocol):
    """A model's files, opened and checked. Safe to use from several threads."""

    path: Path
    config: Mapping[str, Any]
    """Shaped like the hub's `config.json`, whatever the file format."""
    generation_config: Mapping[str, Any]
    """Shaped like `generation_config.json`; empty where the model has none."""
    tensors: Mapping[str, TensorInfo]
    """By the hub's tensor names."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype over the mapped file, or float32 where it is quantised.

        Not to be written to. Raises TensorMissing.
        """
        ...

    def stored(self, name: str) -> StoredTensor:
        """Where the tensor lies, for readers that move bytes themselves. Raises TensorMissing."""
        ...

    def close(self) -> None:
        """Close the files; idempotent. Tensors already read stay valid."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory (safetensors with `config.json`, or GGUF) or a `.gguf` file; raises CheckpointError."""
    path = Path(path).expanduser()
    if path.is_dir():
        if any(path.glob("*.safetensors")):
            return SafetensorsCheckpoint(path)
        return GGUFCheckpoint(_only_gguf(path))
    if not path.exists():
        raise FilesMissing(f"there is no {path}; check the path")
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint(path.parent)
    return GGUFCheckpoint(path)


def _only_gguf(directory: Path) -> Path:
    """The one GGUF model in `directory`; of a split model its first part."""
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
