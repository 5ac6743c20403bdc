"""The tower of Mistral 3 (Pixtral): rotation by rows and columns, squares of patches that become one vector each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.towers.families import PixtralTowerConfig
from cortex.neuron.models.towers.tower import PixelGrid, Tower, Turn, activated, rotation_by
from cortex.neuron.vision.spec import PictureSpec


class PixtralTower(Tower):
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
