"""The models of one family in the reference library, tiny: what all of them have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..tiny_models import tiny_sizes

VOCAB = 97
SIZES: dict[str, Any] = {
    **tiny_sizes(vocab_size=VOCAB, hidden_size=48, intermediate_size=72),
    "eos_token_id": None,
    "pad_token_id": None,
}
FOUR_LAYERS = {"num_hidden_layers": 4}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
LOCAL, YARN = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
)
LATENT = {
    **{"num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 32},
    **{"q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14},
}


@dataclass(frozen=True, slots=True)
class Family:
    """`changes`: by name, the options of each model that is compared, in addition to SIZES."""

    config: Any
    model: Any
    changes: dict[str, dict[str, Any]]
    tower: dict[str, Any] | None = None
    """The vision tower of a model whose language model has a config of its own."""

    def config_of(self, name: str) -> Any:
        sizes = SIZES | self.changes[name]
        if self.tower is None:
            return self.config(**sizes, attn_implementation="eager")
        tied = {"tie_word_embeddings": sizes.pop("tie_word_embeddings", False)}
        return self.config(text_config=sizes, vision_config=self.tower, attn_implementation="eager", **tied)
