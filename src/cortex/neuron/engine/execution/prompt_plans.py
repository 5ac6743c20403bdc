"""Plans of cuDNN's attention for prompts, built one at a time while the engine is idle."""

from __future__ import annotations

import logging
from collections import deque

import torch

from cortex.neuron.kernels.attention import cudnn
from cortex.neuron.kernels.attention.cudnn import Geometry
from cortex.neuron.layers.configs import AttentionConfig
from cortex.neuron.models.decoder import Decoder

log = logging.getLogger(__name__)


class PromptPlans:
    """The plans of one model, for prompts up to a step's tokens. Belongs to the engine thread."""

    def __init__(self, model: Decoder, step_tokens: int) -> None:
        device, dtype = model.parameters.device, model.parameters.dtype
        geometries: dict[Geometry, float] = {}
        if cudnn.is_faster_on(device) and dtype != torch.float32:
            for attention in model.attentions:
                config = attention.config
                if isinstance(config, AttentionConfig) and config.window is None and config.softcap is None:
                    geometry = Geometry(device, dtype, config.heads, config.kv_heads, config.head_dim)
                    geometries[geometry] = config.scale
        lengths = list(cudnn.planned_lengths(step_tokens))
        self._missing = deque((geometry, scale, length) for geometry, scale in geometries.items() for length in lengths)

    def prepare(self) -> bool:
        """Builds the next plan, the shortest prompts first; false if none is left."""
        if not self._missing:
            return False
        geometry, scale, length = self._missing.popleft()
        try:
            cudnn.prepare(geometry, scale, length)
        except (cudnn.Unserved, torch.OutOfMemoryError) as error:
            log.info("no cuDNN plan for prompts of %d tokens and more, using our kernel: %s", length, error)
            self._missing.clear()
        return bool(self._missing)
