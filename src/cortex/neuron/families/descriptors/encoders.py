"""Encoders, and the decoders that only make vectors: EuroBERT and jina-embeddings-v5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cortex.neuron.families.family import ModelFamily
from cortex.neuron.families.gguf import GGUFArchitecture, GGUFKeys
from cortex.neuron.families.splits import CL100K_WHOLE, GPT2

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


def _bert(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Converters leave out the rows that the positions of padding have in some models."""
    del config
    return {"max_position_embeddings": keys.num_rows("position_embd.weight"), "hidden_act": "gelu"}


def _nomic(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    del config
    if keys.has("moe_every_n_layers"):
        raise keys.unsupported("moe_every_n_layers", "mixtures of experts are not supported in encoders")
    return {"hidden_act": "silu", "rope_theta": keys.number("rope.freq_base", 1000.0)}


def _modern(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu",
        "norm_eps": config["layer_norm_eps"],
        "global_rope_theta": keys.number("rope.freq_base", 160_000.0),
        "local_rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
        "local_attention": keys.count("attention.sliding_window", 128),
        "norm_bias": keys.has_tensor("output_norm.bias"),
        "attention_bias": keys.has_tensor("blk.0.attn_qkv.bias"),
    }


_BERT_FAMILY: Final = ModelFamily(
    ("bert",),
    "BERT (bge, e5, mxbai, MiniLM)",
    is_encoder=True,
    pooling="mean",
    score_head="pooler",
    tensor_prefix="bert",
    tensor_names=_BERT,
    gguf=(GGUFArchitecture("bert", options=_bert, pools=True),),
)

FAMILIES: Final = (
    _BERT_FAMILY,
    replace(
        _BERT_FAMILY,
        models="XLM-RoBERTa (BGE-M3, multilingual-e5, bge-reranker)",
        model_types=("camembert", "roberta", "xlm-roberta"),
        score_head="classifier",
        tensor_prefix="roberta",
        gguf=(),
    ),
    ModelFamily(
        ("gte", "new"),
        "gte-en-v1.5, gte-multilingual, snowflake-arctic-embed-v2",
        is_encoder=True,
        pooling="mean",
        score_head="pooler",
        tensor_prefix="gte|model|new",
        tensor_names=_GTE,
    ),
    ModelFamily(
        ("nomic_bert",),
        "nomic-embed",
        is_encoder=True,
        pooling="mean",
        score_head="pooler",
        tensor_prefix="nomic_bert|bert|model",
        tensor_names=_NOMIC,
        gguf=(GGUFArchitecture("nomic-bert", options=_nomic, pools=True),),
    ),
    ModelFamily(
        ("modernbert",),
        "ModernBERT (gte-modernbert, modernbert-embed)",
        is_encoder=True,
        pooling="mean",
        score_head="normed",
        tensor_prefix="model",
        tensor_names=_MODERN,
        pretokenizers={"modern-bert": GPT2},
        gguf=(
            GGUFArchitecture("modern-bert", options=_modern, tensor_names={"ffn_up": "mlp.gate_up_proj"}, pools=True),
        ),
    ),
    ModelFamily(("eurobert",), "EuroBERT", pooling="mean", gguf=(GGUFArchitecture("eurobert", pools=True),)),
    ModelFamily(
        ("jina_embeddings_v5",),
        "jina-embeddings-v5",
        pooling="last",
        pretokenizers={"jina-v5-nano": CL100K_WHOLE},
        has_adapters=True,
    ),
)
