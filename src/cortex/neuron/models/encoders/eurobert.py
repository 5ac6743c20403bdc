"""EuroBERT, and jina-embeddings-v5 on top of it or of Qwen3: decoders that make vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.families.qwen import Qwen3


class EuroBert(Llama):
    """Llama whose tokens attend to later ones, too."""

    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), is_causal=False)


def jina_embeddings(raw: Mapping[str, Any]) -> Architecture:
    """The small model of jina-embeddings-v5 is a Qwen3, the one that is no decoder a EuroBERT."""
    return EuroBert(raw) if raw.get("is_decoder") is False else Qwen3(raw)
