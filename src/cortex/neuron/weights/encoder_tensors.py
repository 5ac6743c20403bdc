"""The names of encoders' tensors → those that layers read. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_BERT: Final = {
    "embeddings.word_embeddings.": "model.embed_tokens.",
    "embeddings.position_embeddings.": "model.embed_positions.",
    "embeddings.token_type_embeddings.": "model.embed_segments.",
    "embeddings.LayerNorm.": "model.embed_norm.",
    "encoder.layer.": "model.layers.",
    ".attention.self.query.": ".self_attn.q_proj.",
    ".attention.self.key.": ".self_attn.k_proj.",
    ".attention.self.value.": ".self_attn.v_proj.",
    ".attention.output.dense.": ".self_attn.o_proj.",
    ".attention.output.LayerNorm.": ".attn_norm.",
    ".intermediate.dense.": ".mlp.up_proj.",
    ".output.dense.": ".mlp.down_proj.",
    ".output.LayerNorm.": ".mlp_norm.",
}
_NOMIC: Final = {
    "embeddings.word_embeddings.": "model.embed_tokens.",
    "embeddings.token_type_embeddings.": "model.embed_segments.",
    "embeddings.LayerNorm.": "model.embed_norm.",
    "layers.": "model.layers.",
    ".post_attention_layernorm.": ".attn_norm.",
    ".post_mlp_layernorm.": ".mlp_norm.",
    # The repositories with code of their own
    "emb_ln.": "model.embed_norm.",
    "encoder.layers.": "model.layers.",
    ".attn.Wqkv.": ".self_attn.qkv_proj.",
    ".attn.out_proj.": ".self_attn.o_proj.",
    ".norm1.": ".attn_norm.",
    ".norm2.": ".mlp_norm.",
    ".mlp.fc11.": ".mlp.up_proj.",
    ".mlp.fc12.": ".mlp.gate_proj.",
    ".mlp.fc2.": ".mlp.down_proj.",
}
_MODERN: Final = {
    "embeddings.tok_embeddings.": "model.embed_tokens.",
    "embeddings.norm.": "model.embed_norm.",
    "final_norm.": "model.norm.",
    "layers.": "model.layers.",
    ".attn.Wqkv.": ".self_attn.qkv_proj.",
    ".attn.Wo.": ".self_attn.o_proj.",
    ".mlp.Wi.": ".mlp.gate_up_proj.",
    ".mlp.Wo.": ".mlp.down_proj.",
}
_GTE: Final = {
    "embeddings.word_embeddings.": "model.embed_tokens.",
    "embeddings.token_type_embeddings.": "model.embed_segments.",
    "embeddings.LayerNorm.": "model.embed_norm.",
    "layers.": "model.layers.",
    ".post_attention_layernorm.": ".attn_norm.",
    ".post_mlp_layernorm.": ".mlp_norm.",
    # The repositories with code of their own
    "encoder.layer.": "model.layers.",
    ".attention.qkv_proj.": ".self_attn.qkv_proj.",
    ".attention.q_proj.": ".self_attn.q_proj.",
    ".attention.k_proj.": ".self_attn.k_proj.",
    ".attention.v_proj.": ".self_attn.v_proj.",
    ".attention.o_proj.": ".self_attn.o_proj.",
    ".attn_ln.": ".attn_norm.",
    ".mlp_ln.": ".mlp_norm.",
}
_FAMILIES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "bert": ("bert", _BERT),
    "camembert": ("roberta", _BERT),
    "roberta": ("roberta", _BERT),
    "xlm-roberta": ("roberta", _BERT),
    "gte": ("gte|model|new", _GTE),
    "new": ("gte|model|new", _GTE),
    "nomic_bert": ("nomic_bert|bert|model", _NOMIC),
    "modernbert": ("model", _MODERN),
}
"""`model_type` → the prefix that a model with a head has before its names, and its own names."""


def encoder_name(model_type: str, name: str) -> str:
    """The name under which layers read a tensor; that of a head is unchanged."""
    prefix, names = _FAMILIES[model_type]
    bare = re.sub(f"^(?:{prefix})\\.", "", name)
    if bare.startswith(("embeddings.", "encoder.")):  # old checkpoints call the parameters of norms otherwise
        bare = bare.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    pattern = "|".join(("^" if own[0] != "." else "") + re.escape(own) for own in sorted(names, key=len, reverse=True))
    return re.sub(pattern, lambda match: names[match[0]], bare)


def is_encoder(model_type: object) -> bool:
    return isinstance(model_type, str) and model_type in _FAMILIES
