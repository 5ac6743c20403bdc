"""Models that are published with a vision tower: the language model, and the tower where its family is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.towers.families import read_tower

TEXT_ONLY = "text only: the vision tower is not loaded"


class TextPart(Architecture):
    """Goes before the family of the language model among the bases of a class. Its config is one level down."""

    prefix = "model.language_model"

    def __init__(self, raw: Mapping[str, Any]) -> None:
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise UnsupportedModel(f"the config of this {raw['model_type']} model has no 'text_config'")
        whole = {"model_type": raw["model_type"]}
        if "tie_word_embeddings" in raw:
            whole["tie_word_embeddings"] = raw["tie_word_embeddings"]
        super().__init__({**text, **whole})
        self.tower = read_tower(raw, self.config.hidden)
        if self.tower is None:
            self.notes = (TEXT_ONLY,)

    def without_tower(self) -> Architecture:
        part = super().without_tower()
        part.notes = (TEXT_ONLY,)
        return part
