"""The towers of each kind: their first and their last step. `build_tower` chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.towers.config import TowerConfig
from cortex.neuron.models.towers.families import (
    Gemma4TowerConfig,
    PatchTowerConfig,
    PixtralTowerConfig,
    QwenTowerConfig,
    SiglipTowerConfig,
)
from cortex.neuron.models.towers.tower import PixelGrid, Tower, Turn, activated, averaged, normed, rotation_by
from cortex.neuron.pictures.spec import PictureSpec


class SiglipTower(Tower):
    """Gemma 3 (SigLIP): pictures of one size, whose patches have a place each and are averaged in squares."""

    config: SiglipTowerConfig

    def embedded(self, pictures: Sequence[PixelGrid]) -> Tensor:
        values = torch.cat([self.patches(picture) for picture in pictures])
        x = F.linear(values, self.weights["patch"], self.weights["patch.bias"])
        return x + self.weights["places"].repeat(len(pictures), 1)

    def projected(self, x: Tensor, pictures: Sequence[PixelGrid]) -> Tensor:
        config, weights = self.config, self.weights
        x = normed(x, weights["out_norm"], weights["out_norm.bias"], config)
        grid = pictures[0].grid
        x = averaged(x.view(len(pictures), -1, config.hidden), grid.rows, grid.columns, config.merge).flatten(0, 1)
        x = F.rms_norm(x.float(), x.shape[-1:], 1 + weights["average_norm"].float(), config.eps).to(x.dtype)
        return x @ weights["out"]


class PixtralTower(Tower):
    """Mistral 3 (Pixtral): rotation by rows and columns, squares of patches that become one vector each."""

    config: PixtralTowerConfig

    def __init__(self, config: PixtralTowerConfig, parameters: Parameters, spec: PictureSpec) -> None:
        super().__init__(config, parameters, spec)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=parameters.device) / config.head_dim
        frequencies = config.theta**-exponents
        self._by_axis = frequencies[0::2], frequencies[1::2]
        """Rows turn by every other frequency, columns by those between."""

    def embedded(self, pictures: Sequence[PixelGrid]) -> Tensor:
        values = torch.cat([self.patches(picture) for picture in pictures])
        x = F.linear(values, self.weights["patch"])
        return F.rms_norm(x, x.shape[-1:], self.weights["patch_norm"], self.config.eps)

    def rotation(self, pictures: Sequence[PixelGrid]) -> Turn:
        places = self.places(pictures).float()
        angles = [places[:, axis, None] * each for axis, each in enumerate(self._by_axis)]
        return rotation_by(torch.cat(angles, dim=-1), self.parameters.dtype)

    def projected(self, x: Tensor, pictures: Sequence[PixelGrid]) -> Tensor:
        config, weights = self.config, self.weights
        x = F.rms_norm(x, x.shape[-1:], weights["out_norm"], config.projector_eps)
        counts = [self.num_patches(picture) for picture in pictures]
        squares = [self._squares(own, picture) for own, picture in zip(x.split(counts), pictures, strict=True)]
        x = F.linear(torch.cat(squares), weights["merge"])
        x = F.linear(x, weights["out1"], weights.get("out1.bias"))
        return F.linear(activated(x, config.projector_activation), weights["out2"], weights.get("out2.bias"))

    def _squares(self, x: Tensor, picture: PixelGrid) -> Tensor:
        """[vectors, hidden · patches of a square]: all patches of a channel follow each other"""
        merge = self.config.merge
        rows, columns = picture.grid.rows, picture.grid.columns
        return x.view(rows, merge, columns, merge, -1).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)


_THETA = 10_000.0


class QwenTower(Tower):
    """The towers of Qwen3-VL and Qwen3.5: a table of places that is stretched over each picture, rotation by rows and
    columns, and squares of patches that become one vector each."""

    config: QwenTowerConfig

    def __init__(self, config: QwenTowerConfig, parameters: Parameters, spec: PictureSpec) -> None:
        super().__init__(config, parameters, spec)
        half = config.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=parameters.device) / half
        self._frequencies = _THETA**-exponents

    def embedded(self, pictures: Sequence[PixelGrid]) -> Tensor:
        merge = self.config.merge
        values = torch.cat([self.patches(picture, merge=merge) for picture in pictures])
        weight = self.weights["patch"]
        if "patch_later" in self.weights:
            weight = weight + self.weights["patch_later"]
        x = F.linear(values, weight, self.weights["patch.bias"])
        return x + torch.cat([self._stretched(picture) for picture in pictures])

    def _stretched(self, picture: PixelGrid) -> Tensor:
        """[patches, hidden]: the table of places over one picture, linear between its entries"""
        config, table = self.config, self.weights["places"]
        rows, columns = picture.patch_rows(config.patch), picture.patch_columns(config.patch)
        across = [self._mixture(count) for count in (rows, columns)]
        square = table.view(config.table_side, config.table_side, config.hidden)
        stretched = torch.einsum("rs,sth->rth", across[0], square.float())
        stretched = torch.einsum("ct,rth->rch", across[1], stretched).to(table.dtype)
        merge = config.merge
        squares = stretched.view(rows // merge, merge, columns // merge, merge, -1).transpose(1, 2)
        return squares.reshape(-1, config.hidden)

    def _mixture(self, count: int) -> Tensor:
        """[count, side]: the part of each entry of one side of the table in `count` places along it"""
        side, device = self.config.table_side, self.parameters.device
        at = torch.arange(count, dtype=torch.float32, device=device) * ((side - 1) / max(1, count - 1))
        return (1 - (at[:, None] - torch.arange(side, device=device)).abs()).clamp(min=0)

    def rotation(self, pictures: Sequence[PixelGrid]) -> Turn:
        return self.axial_rotation(self.places(pictures, self.config.merge), self._frequencies)

    def deep(self, x: Tensor, index: int) -> Tensor:
        role, width = f"deep{index}", self.config.hidden * self.config.merge**2
        return self._merged(self._normed(f"{role}.norm", x.reshape(-1, width)), role)

    def projected(self, x: Tensor, pictures: Sequence[PixelGrid]) -> Tensor:
        del pictures
        return self._merged(self._normed("merger.norm", x), "merger")

    def _normed(self, role: str, x: Tensor) -> Tensor:
        return normed(x, self.weights[role], self.weights[f"{role}.bias"], self.config)

    def _merged(self, x: Tensor, role: str) -> Tensor:
        x = x.reshape(-1, self.config.hidden * self.config.merge**2)
        x = F.gelu(F.linear(x, self.weights[f"{role}.up"], self.weights[f"{role}.up.bias"]))
        return F.linear(x, self.weights[f"{role}.down"], self.weights[f"{role}.down.bias"])


class Gemma4Tower(Tower):
    """The tower of Gemma 4, and what the unified model has in place of one: a projection of patches."""

    config: Gemma4TowerConfig

    def __init__(self, config: Gemma4TowerConfig, parameters: Parameters, spec: PictureSpec) -> None:
        super().__init__(config, parameters, spec)
        half = config.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=parameters.device) / half
        self._frequencies = config.theta**-exponents

    def embedded(self, pictures: Sequence[PixelGrid]) -> Tensor:
        values = torch.cat([self.patches(picture, by_colour=self.config.is_repacked) for picture in pictures])
        x = F.linear(values * 2 - 1, self.weights["patch"])
        places, (across, down) = self.places(pictures), self.weights["places"].chunk(2)
        return x + across[places[:, 1]] + down[places[:, 0]]

    def rotation(self, pictures: Sequence[PixelGrid]) -> Turn:
        """One half of each head turns by columns, the other by rows."""
        places = self.places(pictures).float()
        by_column, by_row = (
            rotation_by(places[:, axis, None] * self._frequencies, self.parameters.dtype) for axis in (1, 0)
        )

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((by_column(first), by_row(second)), dim=-1)

        return turn

    def projected(self, x: Tensor, pictures: Sequence[PixelGrid]) -> Tensor:
        config, weights = self.config, self.weights
        counts = [self.num_patches(picture) for picture in pictures]
        parts = [
            averaged(own[None].float(), picture.grid.rows, picture.grid.columns, config.merge)[0]
            for own, picture in zip(x.split(counts), pictures, strict=True)
        ]
        pooled = torch.cat(parts).to(x.dtype).float() * config.hidden**0.5
        if config.is_standardised:
            pooled = (pooled - weights["std_bias"].float()) * weights["std_scale"].float()
        pooled = pooled.to(x.dtype)
        return F.linear(F.rms_norm(pooled, pooled.shape[-1:], eps=config.eps), weights["out"])


class PatchTower(Tower):
    config: PatchTowerConfig

    def embedded(self, pictures: Sequence[PixelGrid]) -> Tensor:
        config, weights = self.config, self.weights
        values = torch.cat([self.patches(picture, by_colour=config.is_repacked) for picture in pictures])
        x = F.linear(self._normed("patch_norm", values), weights["patch"], weights["patch.bias"])
        places = self.places(pictures)
        table = weights["places"]
        across, down = table.chunk(2) if config.is_repacked else table.view(config.num_places, 2, -1).unbind(1)
        x = self._normed("norm", x) + across[places[:, 1]] + down[places[:, 0]]
        return self._normed("out_norm", x)

    def projected(self, x: Tensor, pictures: Sequence[PixelGrid]) -> Tensor:
        del pictures
        return F.linear(F.rms_norm(x, x.shape[-1:], eps=_EPS), self.weights["out"])

    def _normed(self, role: str, x: Tensor) -> Tensor:
        return normed(x, self.weights[role], self.weights[f"{role}.bias"], self.config)


_EPS = 1e-6
"""The norm before the projection has it in every published config."""


CLASSES: Mapping[type[TowerConfig], Callable[[Any, Parameters, PictureSpec], Tower]] = {
    Gemma4TowerConfig: Gemma4Tower,
    PatchTowerConfig: PatchTower,
    PixtralTowerConfig: PixtralTower,
    QwenTowerConfig: QwenTower,
    SiglipTowerConfig: SiglipTower,
}


def build_tower(config: TowerConfig, parameters: Parameters, spec: PictureSpec) -> Tower:
    return CLASSES[type(config)](config, parameters, spec)
