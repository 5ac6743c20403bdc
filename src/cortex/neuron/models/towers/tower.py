"""The layers that all vision towers share. A family adds its first and its last step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cortex.neuron.kernels.attention.rotate import Rotation
from cortex.neuron.kernels.attention.turn import turned
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.towers.config import TowerConfig, TowerTensor
from cortex.neuron.pictures.picture import PictureGrid
from cortex.neuron.pictures.spec import PictureSpec
from cortex.neuron.private_api.torch import gelu_of_product

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Implementations of attention, the fastest first."""


Turn = Callable[[Tensor], Tensor]
"""Rotates queries or keys: [patches, heads, dim] → the same."""


@dataclass(frozen=True, slots=True)
class PixelGrid:
    """A picture on its way through the tower."""

    grid: PictureGrid
    pixels: bytes
    """[height, width, 3] of uint8"""

    def patch_rows(self, patch: int) -> int:
        return self.grid.height // patch

    def patch_columns(self, patch: int) -> int:
        return self.grid.width // patch


class TowerLayer:
    """Attention among the patches of each picture, then a feed-forward block for each patch."""

    def __init__(self, config: TowerConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = weights
        self._is_gated = len(config.names.up) == 2

    def __call__(self, x: Tensor, counts: Sequence[int], rotation: Turn | None) -> Tensor:
        """x: [patches, hidden] → the same. counts: the patches of each picture, which follow each other."""
        config, weights = self._config, self._weights
        mixed = self._norm("mixer_norm", x)
        qkv = self._linear("qkv", mixed).view(len(x), 3, config.heads, config.head_dim)
        q, k, v = qkv.unbind(1)
        if "q_norm" in weights:
            q, k = (self._head_norm(name, each) for name, each in (("q_norm", q), ("k_norm", k)))
            v = F.rms_norm(v, v.shape[-1:], eps=config.eps)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        scale = 1.0 if "q_norm" in weights else config.head_dim**-0.5
        added = self._linear("output", attention(q, k, v, counts, scale).flatten(1))
        if "after_mixer" in weights:
            added = self._norm("after_mixer", added)
        x = x + added
        added = self._linear("down", self._activated(self._norm("mlp_norm", x)))
        if "after_mlp" in weights:
            added = self._norm("after_mlp", added)
        return x + added

    def _activated(self, x: Tensor) -> Tensor:
        activation = self._config.activation
        if not self._is_gated and activation == "gelu_tanh" and x.is_cuda and "up.bias" in self._weights:
            return gelu_of_product(x, self._weights["up"], self._weights["up.bias"])  # one pass instead of two
        up = self._linear("up", x)
        if not self._is_gated:
            return activated(up, activation)
        gate, up = up.chunk(2, dim=-1)
        return activated(gate, activation).mul_(up)

    def _linear(self, role: str, x: Tensor) -> Tensor:
        ranges = self._weights.get(f"{role}.ranges")
        if ranges is not None:
            limits = ranges.view(-1, 4).unbind()
            parts = zip(self._weights[role].chunk(len(limits)), limits, strict=True)
            return torch.cat([F.linear(x.clamp(a, b), weight).clamp_(c, d) for weight, (a, b, c, d) in parts], dim=-1)
        return F.linear(x, self._weights[role], self._weights.get(f"{role}.bias"))

    def _norm(self, role: str, x: Tensor) -> Tensor:
        return normed(x, self._weights[role], self._weights.get(f"{role}.bias"), self._config)

    def _head_norm(self, role: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[role], self._config.eps)


class Tower(ABC):
    """A tower on one device. Belongs to the engine thread."""

    def __init__(self, config: TowerConfig, parameters: Parameters, spec: PictureSpec) -> None:
        self.config = config
        self.parameters = parameters
        self.weights = {name: _allocated(parameters, tensor) for name, tensor in config.tensors()}
        self.layers = [TowerLayer(config, self._of_layer(index)) for index in range(config.layers)]
        device, dtype = parameters.device, torch.float32
        self._mean = torch.tensor(spec.mean, dtype=dtype, device=device) * 255
        self._std = torch.tensor(spec.std, dtype=dtype, device=device) * 255

    def _of_layer(self, index: int) -> dict[str, Tensor]:
        prefix = f"{index}."
        named = self.weights.items()
        return {name.removeprefix(prefix): tensor for name, tensor in named if name.startswith(prefix)}

    def __call__(self, pictures: Sequence[PixelGrid]) -> Tensor:
        """[vectors of all pictures, parts, out]"""
        with torch.inference_mode():
            counts = [self.num_patches(picture) for picture in pictures]
            x = self.embedded(pictures)
            rotation = self.rotation(pictures)
            deep: list[Tensor] = []
            for index, layer in enumerate(self.layers):
                x = layer(x, counts, rotation)
                if index in self.config.deep_layers:
                    deep.append(self.deep(x, len(deep)))
            return torch.stack([self.projected(x, pictures), *deep], dim=1)

    def num_patches(self, picture: PixelGrid) -> int:
        return picture.patch_rows(self.config.patch) * picture.patch_columns(self.config.patch)

    @abstractmethod
    def embedded(self, pictures: Sequence[PixelGrid]) -> Tensor:
        """[patches of all pictures, hidden]: the input of the first layer"""

    def rotation(self, pictures: Sequence[PixelGrid]) -> Turn | None:
        """How queries and keys are rotated by the places of patches; None: they are not rotated."""
        del pictures
        return None

    def deep(self, x: Tensor, index: int) -> Tensor:
        """[vectors, out]: what is added to one of the decoder's first layers"""
        raise NotImplementedError

    @abstractmethod
    def projected(self, x: Tensor, pictures: Sequence[PixelGrid]) -> Tensor:
        """x: [patches, hidden] after the last layer → [vectors, out]"""

    def patches(self, picture: PixelGrid, *, by_colour: bool = True, merge: int = 1) -> Tensor:
        """[patches, values]: normalised, in rows, or in squares of `merge` patches. `by_colour`: all values of a colour
        come before those of the next; otherwise the colours of a pixel follow each other."""
        grid, patch, device = picture.grid, self.config.patch, self.parameters.device
        host = torch.empty(len(picture.pixels), dtype=torch.uint8, pin_memory=device.type == "cuda")
        host.numpy()[:] = np.frombuffer(picture.pixels, dtype=np.uint8)
        pixels = host.to(device, non_blocking=True)
        values = ((pixels.view(grid.height, grid.width, 3) - self._mean) / self._std).to(self.parameters.dtype)
        rows, columns = grid.height // (patch * merge), grid.width // (patch * merge)
        values = values.view(rows, merge, patch, columns, merge, patch, 3)
        order = (0, 3, 1, 4, 6, 2, 5) if by_colour else (0, 3, 1, 4, 2, 5, 6)
        return values.permute(order).reshape(-1, 3 * patch**2)

    def axial_rotation(self, places: Tensor, frequencies: Tensor) -> Turn:
        """places: [patches, 2] of rows and columns; frequencies: [pairs of one axis]. The pairs of rows come first."""
        angles = (places[:, :, None].float() * frequencies).flatten(1)
        return rotation_by(angles, self.parameters.dtype)

    def places(self, pictures: Sequence[PixelGrid], merge: int = 1) -> Tensor:
        """[patches, 2]: the row and the column of each patch, in the order of `patches`."""
        found = [
            patch_places(picture.patch_rows(self.config.patch), picture.patch_columns(self.config.patch), merge)
            for picture in pictures
        ]
        return torch.from_numpy(np.concatenate(found)).to(self.parameters.device)


def patch_places(rows: int, columns: int, merge: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[patches, 2]: rows and columns of patches, in squares of `merge`."""
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    both = np.stack((row, column), axis=-1).reshape(rows // merge, merge, columns // merge, merge, 2)
    return both.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def rotation_by(angles: Tensor, dtype: torch.dtype) -> Turn:
    """angles: [patches, pairs], which are half of a head apart"""
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    both = torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)
    return partial(turned, rotation=Rotation(*both))


def attention(q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], scale: float) -> Tensor:
    """q, k and v: [patches, heads, dim] → the same: each patch sees those of its picture. Neighbours of equal size are
    computed together."""
    parts, start, first = [], 0, 0
    attend = partial(F.scaled_dot_product_attention, scale=scale)
    while first < len(counts):
        last = first
        while last + 1 < len(counts) and counts[last + 1] == counts[first]:
            last += 1
        number, end = last + 1 - first, start + (last + 1 - first) * counts[first]
        shaped = [each[start:end].unflatten(0, (number, -1)).transpose(1, 2) for each in (q, k, v)]
        if q.is_cuda:
            with sdpa_kernel(BACKENDS, set_priority=True):
                mixed = attend(*shaped)
        else:
            mixed = attend(*shaped)
        parts.append(mixed.transpose(1, 2).flatten(0, 1))
        start, first = end, last + 1
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def averaged(x: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """x: [pictures, patches, hidden] → [pictures, vectors, hidden]: the means of squares of `merge` patches"""
    return x.view(len(x), rows, merge, columns, merge, -1).mean((2, 4)).flatten(1, 2)


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, config: TowerConfig, eps: float | None = None) -> Tensor:
    eps = config.eps if eps is None else eps
    if bias is None and config.is_rms:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _allocated(parameters: Parameters, tensor: TowerTensor) -> Tensor:
    """Memory for a parameter, bound to its tensors of the checkpoint."""
    if not tensor.columns:
        memory = parameters.empty(sum(tensor.sources.values()))
    else:
        memory = parameters.empty(sum(tensor.sources.values()), tensor.columns)
    for (source, rows), part in zip(tensor.sources.items(), memory.split(list(tensor.sources.values())), strict=True):
        if tensor.shape is None:
            parameters.bind(source, part)
        else:
            parameters.bind(source, part, partial(_flattened, rows=rows, frames=tensor.frames), shape=tensor.shape)
    return memory


def _flattened(tensor: Tensor, rows: int, frames: int) -> Tensor:
    """[rows, colours, (frames,) patch, patch] → [rows, columns]"""
    if frames > 1:
        tensor = tensor.float().sum(2).to(tensor.dtype) if tensor.dim() == 5 else tensor
    return tensor.reshape(rows, -1) if tensor.dim() else tensor.reshape(1)
