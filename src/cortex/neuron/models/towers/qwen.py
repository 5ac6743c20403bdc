"""The towers of Qwen3-VL and Qwen3.5: a table of places that is stretched over each picture, rotation by rows and
columns, and squares of patches that become one vector each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.towers.families import QwenTowerConfig
from cortex.neuron.models.towers.tower import PixelGrid, Tower, Turn, normed
from cortex.neuron.vision.spec import PictureSpec

_THETA = 10_000.0


class QwenTower(Tower):
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
