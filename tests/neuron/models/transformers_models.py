"""Tiny models of architectures that no family here has: the `transformers` library runs their modules."""

from __future__ import annotations

from typing import Any

import transformers

from .family_models import EXPERTS
from .reference_models import randomised
from .tiny_family import FOUR_LAYERS, VOCAB, Family

_OLD_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128},
    **{"eos_token_id": None, "bos_token_id": None},
}


def _family(name: str, changes: dict[str, dict[str, Any]], model: str | None = None) -> Family:
    return Family(getattr(transformers, f"{name}Config"), getattr(transformers, model or f"{name}ForCausalLM"), changes)


TABLE: dict[str, Family] = {
    "apertus": _family("Apertus", {"plain": {}}),
    "arcee": _family("Arcee", {"plain": {}, "biases": {"attention_bias": True, "mlp_bias": True}}),
    "cohere": _family("Cohere", {"plain": {}, "norms": {"use_qk_norm": True, "tie_word_embeddings": False}}),
    "cwm": _family("Cwm", {"windows": {"sliding_window": 9, **FOUR_LAYERS}}),
    "gemma": _family("Gemma", {"plain": {"head_dim": 16}}),
    "gemma2": _family(
        "Gemma2", {"caps": {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0, **FOUR_LAYERS}}
    ),
    "glm": _family("Glm", {"plain": {"head_dim": 16}}),
    "gpt2": _family("GPT2", {"plain": _OLD_SIZES | {"n_inner": 72}}, "GPT2LMHeadModel"),
    "gpt_bigcode": _family("GPTBigCode", {"one key head": _OLD_SIZES}),
    "gpt_neox": _family(
        "GPTNeoX",
        {
            "parallel": {},
            "in turn": {"use_parallel_residual": False, "attention_bias": False},
            "wide": {"hidden_size": 256, "intermediate_size": 512},
        },
    ),
    "granite_swa": _family("GraniteSWA", {"sinks": {"sliding_window": 9, **FOUR_LAYERS}}),
    "granitemoe": _family("GraniteMoe", {"plain": {"num_local_experts": 6, "num_experts_per_tok": 3}}),
    "helium": _family("Helium", {"plain": {"head_dim": 12}}),
    "minicpm3": _family(
        "MiniCPM3",
        {
            "latent": {
                **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
                **{"v_head_dim": 10, "num_key_value_heads": 4, "head_dim": 4},
            }
        },
    ),
    "mixtral": _family(
        "Mixtral",
        {"plain": {"num_local_experts": 6}, "window": {"num_local_experts": 4, "sliding_window": 7}},
    ),
    "nemotron": _family("Nemotron", {"plain": {"head_dim": 12}}),
    "olmo": _family("Olmo", {"plain": {}, "clipped": {"clip_qkv": 0.5}}),
    "olmoe": _family("Olmoe", {"plain": {"num_experts": 6, "num_experts_per_tok": 3}}),
    "opt": _family("OPT", {"plain": {"ffn_dim": 72, "word_embed_proj_dim": 48}}),
    "persimmon": _family("Persimmon", {"plain": {"num_key_value_heads": 4}}),
    "phi": _family("Phi", {"plain": {}, "norms": {"qk_layernorm": True, "num_key_value_heads": 4}}),
    "phimoe": _family("Phimoe", {"plain": {"num_local_experts": 6, "sliding_window": 11}}),
    "qwen2_moe": _family("Qwen2Moe", {"shared": {"num_experts": 6, "shared_expert_intermediate_size": 40, **EXPERTS}}),
    "starcoder2": _family("Starcoder2", {"window": {"sliding_window": 8}, "tied": {"tie_word_embeddings": True}}),
}
CASES = [(family, name) for family, entry in TABLE.items() for name in entry.changes]


def reference_of(family: str, name: str) -> Any:
    entry = TABLE[family]
    config = entry.config_of(name)
    return randomised(lambda: entry.model(config), std=0.15, vector_std=0.5)
