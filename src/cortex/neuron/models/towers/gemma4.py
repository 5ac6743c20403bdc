"""The tower of Gemma 4, and what the unified model has in place of one: a projection of patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.towers.families import Gemma4TowerConfig, PatchTowerConfig
from cortex.neuron.models.towers.tower import PixelGrid, Tower, Turn, averaged, normed, rotation_by
from cortex.neuron.vision.spec import PictureSpec


class Gemma4Tower(Tower):
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
