"""Converts GGUF metadata to the format of the hub's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.gguf import MAX_EXPERTS, MAX_HEADS, GGUFArchitecture
from cortex.neuron.families.registry import GGUF
from cortex.neuron.weights.delta_heads import DeltaHeads
from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.gguf.encoders import encoder_config, gguf_pooling
from cortex.neuron.weights.gguf.keys import Keys
from cortex.neuron.weights.gguf.metadata import GGUFFile
from cortex.neuron.weights.gguf.rope import rope_scaling
from cortex.neuron.weights.pooling_files import with_pooling

_RECURRENT: Final = ("short_convolution", "mamba")
"""Mixers that only some layers have: what differs from layer to layer is in the options."""


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The config of the model in the hub's format. Raises CheckpointError if it is incomplete or not supported."""
    name = file.metadata.get("general.architecture")
    if name not in GGUF:
        raise Unsupported(
            f"{file.path} has the architecture {str(name)[:80]!r}; supported in GGUF: {', '.join(sorted(GGUF))}"
        )
    architecture, family = GGUF[name]
    keys = Keys(file, name)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise Malformed(f"{file.path} has no token_embd.weight; is the model complete?")
    hidden_size = keys.count("embedding_length")
    pooling = gguf_pooling(file, architecture, hidden_size)
    if family.is_encoder:
        config = encoder_config(file, family.model_types[0], keys)
        return with_pooling(config | (architecture.options(keys, config) if architecture.options else {}), pooling)

    num_layers = _num_layers(file, keys)
    num_heads = (
        max(keys.counts("attention.head_count", num_layers))
        if architecture.heads_by_layer
        else keys.count("attention.head_count")
    )
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim or (rotary_dim < head_dim and not architecture.rotates_part):
        raise Unsupported(f"{file.path} rotates {rotary_dim} of {head_dim} dimensions, which is not supported in GGUF")
    rope_theta = keys.number("rope.freq_base", 10000.0)
    varies = architecture.sizes_by_layer or architecture.mixer in _RECURRENT
    if not architecture.is_mixture and not varies and file.metadata.get(f"{name}.expert_count"):
        raise Unsupported(f"{file.path} is a {name} mixture of experts, which is not supported in GGUF")

    config = {
        "model_type": family.model_types[0],
        "architectures": [architecture.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(keys, architecture, num_layers, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", architecture.norm_eps),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling(file, name, rope_theta, rotary_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": "bfloat16",
    }
    if keys.has("nextn_predict_layers") and architecture.head:
        config["num_nextn_predict_layers"] = keys.count("nextn_predict_layers")
    if architecture.is_mixture:
        config |= _mixture(keys)
    elif architecture.mixer not in _RECURRENT:
        config["intermediate_size"] = _of_first_layer(keys, architecture, "feed_forward_length")
    if sections := file.metadata.get(f"{name}.rope.dimension_sections"):
        config["mrope_section"] = list(sections)[:3]
    if architecture.rotates_part:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if architecture.mixer == "gated_delta":
        config |= _gated_delta(keys)
    if architecture.options is not None:
        config |= architecture.options(keys, config)
    return with_pooling(config, pooling)


def delta_heads(config: Mapping[str, Any], architecture: GGUFArchitecture) -> DeltaHeads | None:
    """The gated delta nets of a config that `config_of` returned; None: the model has none."""
    if "linear_num_key_heads" not in config:
        return None
    return DeltaHeads(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        is_tiled=architecture.is_tiled,
    )


def _num_layers(file: GGUFFile, keys: Keys) -> int:
    """Without the layers that only predict further tokens, which come last."""
    num_layers = keys.count("block_count")
    extra = keys.count("nextn_predict_layers") if keys.has("nextn_predict_layers") else 0
    if extra >= num_layers:
        raise Malformed(f"{file.path} has {num_layers} layers, {extra} of them for prediction; convert the model again")
    return num_layers - extra


def _num_kv_heads(keys: Keys, architecture: GGUFArchitecture, num_layers: int, num_heads: int) -> int:
    if architecture.mixer in _RECURRENT:
        return keys.count_of_layers("attention.head_count_kv", num_layers, num_heads)
    return _of_first_layer(keys, architecture, "attention.head_count_kv", num_heads)


def _of_first_layer(keys: Keys, architecture: GGUFArchitecture, name: str, default: int | None = None) -> int:
    return keys.counts(name, 1, default)[0] if architecture.sizes_by_layer else keys.count(name, default)


def _mixture(keys: Keys) -> dict[str, Any]:
    shared = "expert_shared_feed_forward_length"
    return {
        "intermediate_size": keys.count("feed_forward_length", keys.count("expert_feed_forward_length")),
        "num_experts": keys.count("expert_count", limit=MAX_EXPERTS),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **({"shared_expert_intermediate_size": keys.count(shared)} if keys.has(shared) else {}),
    }


def _gated_delta(keys: Keys) -> dict[str, Any]:
    value_heads, inner = keys.count("ssm.time_step_rank", limit=MAX_HEADS), keys.count("ssm.inner_size")
    key_heads = keys.count("ssm.group_count", limit=MAX_HEADS)
    if inner % value_heads or value_heads % key_heads:
        raise keys.malformed(
            f"has {inner} values in {value_heads} heads for {key_heads} key heads, which do not divide"
        )
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "full_attention_interval": keys.count("full_attention_interval", 4),
    }
