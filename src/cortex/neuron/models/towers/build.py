"""Which class runs each family's tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.towers.config import TowerConfig
from cortex.neuron.models.towers.families import (
    Gemma4TowerConfig,
    PatchTowerConfig,
    PixtralTowerConfig,
    QwenTowerConfig,
    SiglipTowerConfig,
)
from cortex.neuron.models.towers.gemma4 import Gemma4Tower, PatchTower
from cortex.neuron.models.towers.pixtral import PixtralTower
from cortex.neuron.models.towers.qwen import QwenTower
from cortex.neuron.models.towers.siglip import SiglipTower
from cortex.neuron.models.towers.tower import Tower
from cortex.neuron.vision.spec import PictureSpec

CLASSES: Mapping[type[TowerConfig], Callable[[Any, Parameters, PictureSpec], Tower]] = {
    Gemma4TowerConfig: Gemma4Tower,
    PatchTowerConfig: PatchTower,
    PixtralTowerConfig: PixtralTower,
    QwenTowerConfig: QwenTower,
    SiglipTowerConfig: SiglipTower,
}


def build_tower(config: TowerConfig, parameters: Parameters, spec: PictureSpec) -> Tower:
    return CLASSES[type(config)](config, parameters, spec)
