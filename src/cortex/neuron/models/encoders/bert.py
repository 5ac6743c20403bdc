"""BERT (bge, e5, mxbai, MiniLM) and XLM-RoBERTa (BGE-M3, multilingual-e5, bge-reranker): learned positions, norms after
blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.models.architecture import EndsConfig
from cortex.neuron.models.config import count_in
from cortex.neuron.models.encoders.architecture import POSITIONS, EncoderArchitecture


class Bert(EncoderArchitecture):
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 30_522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
    }

    def read_ends(self) -> EndsConfig:
        ends = super().read_ends()
        tables = {**ends.tables, POSITIONS: count_in(self.raw, "max_position_embeddings")}
        return EndsConfig(ends.norm, norms=ends.norms, tables=tables)


class Roberta(Bert):
    """The positions of padding come first in its table."""

    defaults: ClassVar[Mapping[str, Any]] = {**Bert.defaults, "vocab_size": 50_265, "pad_token_id": 1}

    @property
    def first_position(self) -> int:  # type: ignore[override]
        padding = self.raw["pad_token_id"]
        return padding + 1 if type(padding) is int and 0 <= padding < 1 << 16 else 0

    @property
    def num_positions(self) -> int:
        return max(1, super().num_positions - self.first_position)
