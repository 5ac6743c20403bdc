"""The options of tiny Gemma 4 models: every kind that is published, and what their configs can say besides."""

from __future__ import annotations

from typing import Any

_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "global_head_dim": 24,
}
_WHOLE = {"hidden_size_per_layer_input": 0, **_LAYERS}
_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
_OWN_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
_ONE_PROJECTION = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_READERS = {
    **{"num_hidden_layers": 7, "num_kv_shared_layers": 4, "sliding_window": 9, "global_head_dim": 24},
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, *["full_attention"] * 2],
}

GEMMA4: dict[str, dict[str, Any]] = {
    "dense": {**_WHOLE, **_ONE_PROJECTION, "final_logit_softcapping": 20.0},
    "mixture": {**_WHOLE, **_ONE_PROJECTION, **_EXPERTS},
    "readers": {**_READERS, **_OWN_INPUTS, "use_double_wide_mlp": True, "final_logit_softcapping": 20.0},
    "all of it": {
        **{**_READERS, **_OWN_INPUTS, **_EXPERTS, **_ONE_PROJECTION, "attention_bias": True},
        **{"tie_word_embeddings": False, "head_dim": 16},
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "proportional", "rope_theta": 10_000.0},
                **{"partial_rotary_factor": 0.5, "factor": 4.0},
            },
            "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    },
}
GEMMA4_UNIFIED: dict[str, dict[str, Any]] = {
    "unified": {**_LAYERS, **_ONE_PROJECTION, "tie_word_embeddings": True, "pad_token_id": 0},
}
GEMMA4_TOWER: dict[str, Any] = {
    **{"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8},
}
GEMMA4_PATCHES: dict[str, Any] = {
    **{"model_type": "gemma4_unified_vision", "patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 48},
    **{"mm_posemb_size": 4, "output_proj_dims": 48},
}
