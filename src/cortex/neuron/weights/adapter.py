"""The adapter that a repository has next to its weights: low-rank changes, added to matrices as they are loaded.

A repository may have one for each of several tasks, over weights that make no useful vectors alone. That for retrieval
is used here; each task also has a repository of its own, in which its adapter is merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from cortex.neuron.families.registry import family_of
from cortex.neuron.weights.directory import read_json
from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.pooling_files import module_folder

if TYPE_CHECKING:
    import torch

ADAPTER_KEY: Final = "adapter_scale"
"""Where a checkpoint's config has the factor of the changes. A model without an adapter has none."""
WEIGHTS: Final = "adapter_model.safetensors"
_FOLDERS: Final = ("adapters", "retrieval")
_PREFIXES: Final = ("base_model.model.", "model.")
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_PLAIN: Final = {"use_dora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}
"""Options of adapters → what they must be, where they are set."""


class AdaptedFiles(Protocol):
    """The part of a checkpoint that is read here."""

    config: Mapping[str, Any]

    @property
    def tensors(self) -> Mapping[str, object]: ...

    def read(self, name: str) -> torch.Tensor: ...


def adapter_folder(directory: Path, config: Mapping[str, Any]) -> Path | None:
    """Where the adapter of a model is; None for a model without one. Raises Malformed."""
    if not family_of(config).has_adapters or not (directory / _FOLDERS[0]).exists():
        return None
    for name in _FOLDERS:
        directory = module_folder(directory, name)
    return directory


def adapter_scale(folder: Path) -> float:
    """The factor of the changes. Raises CheckpointError."""
    options = read_json(folder, "adapter_config.json")
    rank, alpha = options.get("r"), options.get("lora_alpha")
    if type(rank) is not int or isinstance(alpha, bool) or not isinstance(alpha, int | float) or rank < 1:
        raise Malformed(f"{folder} has an adapter of rank {str(rank)[:80]} and lora_alpha {str(alpha)[:80]}")
    for name, plain in _PLAIN.items():
        if options.get(name) and options[name] != plain:
            raise Unsupported(f"{folder} has an adapter with {name}, which is not supported")
    return float(alpha) / (rank**0.5 if options.get("use_rslora") is True else rank)


def adapter_tensor(name: str) -> str:
    """The name of an adapter's tensor among those of the model."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def with_adapter(
    checkpoint: AdaptedFiles, name: str, transform: Callable[[torch.Tensor], torch.Tensor] | None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a tensor goes through as it is loaded: `transform`, and before it the addition of the adapter's change."""
    matrix, scale = name.removesuffix(".weight"), checkpoint.config.get(ADAPTER_KEY)
    if scale is None or matrix + _DOWN not in checkpoint.tensors or matrix + _UP not in checkpoint.tensors:
        return transform

    def adapted(weight: torch.Tensor) -> torch.Tensor:
        down, up = (checkpoint.read(matrix + part).to(weight.device).float() for part in (_DOWN, _UP))
        changed = weight.float().addmm_(up, down, alpha=scale).to(weight.dtype)
        return changed if transform is None else transform(changed)

    return adapted
