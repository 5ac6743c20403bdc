"""Which class runs each family's tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.towers.config import TowerConfig
from cortex.neuron.models.towers.families import QwenTowerConfig
from cortex.neuron.models.towers.qwen import QwenTower
from cortex.neuron.models.towers.tower import Tower
from cortex.neuron.vision.spec import PictureSpec

CLASSES: Mapping[type[TowerConfig], Callable[[Any, Parameters, PictureSpec], Tower]] = {
    QwenTowerConfig: QwenTower,
}


def build_tower(config: TowerConfig, parameters: Parameters, spec: PictureSpec) -> Tower:
    return CLASSES[type(config)](config, parameters, spec)
