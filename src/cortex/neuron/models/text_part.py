"""Models that are published with a vision tower, of which the language model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.errors import UnsupportedModel


class TextPart(Architecture):
    """Goes before the family of the language model among the bases of a class. Its config is one level down."""

    prefix = "model.language_model"
    notes = ("text only: the vision tower is not loaded",)

    def __init__(self, raw: Mapping[str, Any]) -> None:
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise UnsupportedModel(f"the config of this {raw['model_type']} model has no 'text_config'")
        whole = {"model_type": raw["model_type"]}
        if "tie_word_embeddings" in raw:
            whole["tie_word_embeddings"] = raw["tie_word_embeddings"]
        super().__init__({**text, **whole})
