"""An embedding or rerank model as an engine: the contract is that of the package `engine`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import LoadedModel
from cortex.neuron.engine.pooling.loop import PoolingLoop
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.models.pooling.model import PooledModel

BATCH_TOKENS: Final = {"cuda": 16_384, "cpu": 1_024}
"""Most tokens of a batch, unless a load says otherwise: enough for a device to be busy, and little to wait for."""


class PoolingEngine(Engine):
    """Belongs to the engine thread of its device's worker."""

    def __init__(self, loaded: LoadedModel, spec: LoadSpec) -> None:
        assert isinstance(loaded.body, PooledModel)
        self.pooled = loaded.body
        super().__init__(loaded, spec)
        self.info = replace(self.info, vector_width=self.pooled.width)

    def _new_loop(self) -> PoolingLoop:
        batch_tokens = self._spec.prefill_chunk_tokens or BATCH_TOKENS[self._device.type]
        context_tokens = self._limits.context_tokens
        return PoolingLoop(
            self.pooled, batch_tokens, context_tokens, self._counters, shares_device=lambda: self.shares_device
        )

    def close(self) -> None:
        del self.pooled
        super().close()
