"""The tower of Gemma 3 (SigLIP): pictures of one size, whose patches have a place each and are averaged in squares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.models.towers.families import SiglipTowerConfig
from cortex.neuron.models.towers.tower import PixelGrid, Tower, averaged, normed


class SiglipTower(Tower):
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
