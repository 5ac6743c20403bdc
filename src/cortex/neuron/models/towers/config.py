"""The structure and size of a vision tower. Imports no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cortex.neuron.families.towers import TowerLayer
from cortex.neuron.pictures.picture import PictureRules

PASS_PATCHES = {"cuda": 16_384, "cpu": 4096}
"""Most patches that the tower computes at once, unless a single picture has more."""
MIN_CACHED_VECTORS = 4096
"""Vectors of pictures that are kept for later requests, at least; where more patches are computed at once, as many."""

WHOLE_PICTURE_TOKENS = 1120
"""Positions of the largest picture in models whose pictures are computed whole."""
RANGE = ("input_min", "input_max", "output_min", "output_max")
"""The limits of a linear layer's inputs and outputs."""

Activation = Literal["gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True, slots=True)
class TowerTensor:
    """A parameter of a tower."""

    sources: Mapping[str, int]
    """The tensors of the checkpoint that fill it, by name → rows (elements of a vector), in order."""
    columns: int = 0
    """0: it is a vector."""
    shape: tuple[int, ...] | None = None
    """The shape in the checkpoint where it has more dimensions, which are flattened."""
    frames: int = 1
    """Copies of a picture that the tensor has columns for, as frames of a film: they are added up."""

    @property
    def num_elements(self) -> int:
        return sum(self.sources.values()) * max(1, self.columns)


@dataclass(frozen=True, slots=True)
class TowerConfig(ABC):
    """A transformer over the patches of a picture, which all see each other. A family adds how patches become its
    input, and how its output becomes the decoder's."""

    prefix: str
    layers: int
    hidden: int
    heads: int
    head_dim: int
    inner: int
    patch: int
    merge: int
    """Patches to the side of what becomes one vector."""
    out: int
    """The width of a vector: that of the decoder's residual stream."""
    names: TowerLayer
    eps: float = 1e-6
    is_rms: bool = False
    """Whether its norms are by the root mean square, without a bias."""
    bias: bool = True
    activation: Activation = "gelu_tanh"
    is_clipped: bool = False
    """Whether the inputs and outputs of linear layers are limited, each to a range of its own."""
    deep_layers: tuple[int, ...] = ()
    """The layers whose outputs are added to the decoder's first layers, too."""
    rules: PictureRules = field(default_factory=PictureRules)

    @property
    def num_parts(self) -> int:
        """Vectors for one position: the one of the prompt, and those that the first layers add."""
        return 1 + len(self.deep_layers)

    @property
    def patch_values(self) -> int:
        return 3 * self.patch**2

    @abstractmethod
    def ends(self) -> Iterator[tuple[str, TowerTensor]]:
        """The parameters outside the layers, by the name that the family gives them."""

    def layer_tensors(self, index: int) -> Iterator[tuple[str, TowerTensor]]:
        """The parameters of one layer."""
        path, names = self.names.path.format(index), self.names
        mixed = self.heads * self.head_dim
        yield from self.norm("mixer_norm", f"{path}.{names.mixer_norm}", self.hidden)
        rows = 3 * mixed // len(names.qkv)
        yield from self.linear("qkv", {f"{path}.{name}": rows for name in names.qkv}, self.hidden)
        yield from self.linear("output", {f"{path}.{names.output}": self.hidden}, mixed)
        yield from self.norm("mlp_norm", f"{path}.{names.mlp_norm}", self.hidden)
        yield from self.linear("up", {f"{path}.{name}": self.inner for name in names.up}, self.hidden)
        yield from self.linear("down", {f"{path}.{names.down}": self.hidden}, self.inner)
        for role, name in (("after_mixer", names.after_mixer), ("after_mlp", names.after_mlp)):
            if name:
                yield from self.norm(role, f"{path}.{name}", self.hidden)
        for role, name in zip(("q_norm", "k_norm"), names.head_norms, strict=False):
            yield from self.norm(role, f"{path}.{name}", self.head_dim)

    def tensors(self) -> Iterator[tuple[str, TowerTensor]]:
        """All parameters."""
        yield from self.ends()
        for index in range(self.layers):
            for name, tensor in self.layer_tensors(index):
                yield f"{index}.{name}", tensor

    def linear(
        self, role: str, sources: Mapping[str, int], columns: int, *, bias: bool | None = None
    ) -> Iterator[tuple[str, TowerTensor]]:
        yield role, TowerTensor({f"{name}.weight": rows for name, rows in sources.items()}, columns)
        if self.bias if bias is None else bias:
            yield f"{role}.bias", TowerTensor({f"{name}.bias": rows for name, rows in sources.items()})
        owners = [name.removesuffix(".linear") for name in sources if name.endswith(".linear") and self.is_clipped]
        if owners:
            yield f"{role}.ranges", TowerTensor({f"{name}.{end}": 1 for name in owners for end in RANGE}, 0, ())

    def norm(self, role: str, name: str, size: int, *, bias: bool | None = None) -> Iterator[tuple[str, TowerTensor]]:
        yield role, TowerTensor({f"{name}.weight": size})
        if not self.is_rms if bias is None else bias:
            yield f"{role}.bias", TowerTensor({f"{name}.bias": size})


def tower_weight_bytes(config: TowerConfig, item_bytes: int) -> int:
    return sum(tensor.num_elements for _, tensor in config.tensors()) * item_bytes


def num_cached_vectors(pass_patches: int) -> int:
    return max(pass_patches, MIN_CACHED_VECTORS)


def tower_room_bytes(config: TowerConfig, item_bytes: int, pass_patches: int) -> int:
    """Memory of a pass of the tower in addition to its weights, and of the cached vectors."""
    width = 4 * config.hidden + 4 * config.heads * config.head_dim + 2 * len(config.names.up) * config.inner
    kept = num_cached_vectors(pass_patches) * config.out * config.num_parts
    return (pass_patches * width + kept) * item_bytes


def side_of(num_positions: int) -> int:
    """The side of a square table of positions. Raises ValueError."""
    side = math.isqrt(num_positions)
    if side * side != num_positions:
        raise ValueError(f"{num_positions} positions are not a square number")
    return side
