"""Converts GGUF metadata to the format of the hub's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.weights.delta_heads import DeltaHeads
from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.gguf.encoders import ENCODERS, encoder_config, gguf_pooling
from cortex.neuron.weights.gguf.family_options import OPTIONS
from cortex.neuron.weights.gguf.keys import Keys
from cortex.neuron.weights.gguf.metadata import GGUFFile
from cortex.neuron.weights.gguf.rope import rope_scaling
from cortex.neuron.weights.pooling_files import with_pooling

ARCHITECTURES: Final = {
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "deepseek2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5-moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "eurobert": ("eurobert", "EuroBertModel"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "gemma-embedding": ("gemma3_text", "Gemma3TextModel"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "hunyuan-dense": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "laguna": ("laguna", "LagunaForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "mellum": ("mellum", "MellumForCausalLM"),
    "minimax-m2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "mistral3": ("mistral", "MistralForCausalLM"),
    "muse-glimmer": ("muse_glimmer_text", "MuseGlimmerForConditionalGeneration"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "nemotron_h_moe": ("nemotron_h", "NemotronHForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3vl": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3vlmoe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
}
ALSO_READ: Final[Mapping[str, tuple[str, ...]]] = {
    "deepseek2": ("deepseek_v2", "glm4_moe_lite", "kimi_k2"),
    "mistral3": ("ministral3",),
    "olmo2": ("olmo3",),
}
"""Other families whose models have files of an architecture: the options in a file say what differs."""
INTERLEAVED: Final = frozenset({"granite", "granitehybrid", "llama", "mistral3", "muse-glimmer", "smollm3"})
"""Architectures whose converters interleave the rotary halves of queries and keys."""
_MIXTURES: Final = frozenset(
    {"deepseek2", "ernie4_5-moe", "glm4moe", "gpt-oss", "laguna", "mellum", "minimax-m2", "qwen3moe", "qwen3next"}
    | {"qwen35moe", "qwen3vlmoe"}
)
_HYBRIDS: Final = frozenset({"qwen3next", "qwen35", "qwen35moe"})
"""Architectures with gated delta nets in most layers."""
_RECURRENT: Final = frozenset({"granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"})
"""Architectures with other recurrent layers: what differs from layer to layer is in their options."""
_PARTIAL: Final = frozenset({"deepseek2", "glm4", "glm4moe", "laguna", "minimax-m2", "phi3"}) | _HYBRIDS
"""Architectures that rotate a part of each head."""
_HEADS_BY_LAYER: Final = frozenset({"laguna"})
"""Architectures whose layers may have different numbers of heads."""
PLUS_ONE_NORMS: Final = frozenset({"gemma-embedding", "gemma3", "muse-glimmer"}) | _HYBRIDS
"""Architectures whose converters add one to the weights of norms."""
PLAIN_LAST_NORM: Final = frozenset({"muse-glimmer"})
"""Those of them that keep the weight of the last norm as it is."""
_BY_LAYER: Final = frozenset({"gemma4"})
"""Architectures whose layers differ in their sizes, and whose options say how; here they have those of the first."""
_TILED: Final = frozenset({"qwen35", "qwen35moe"})
"""Architectures whose value heads converters put into another order."""

HEADED: Final = frozenset({"deepseek2", "glm4moe"}) | _HYBRIDS
"""Architectures whose heads for further tokens are read."""

# Far above every published model; they bound the work for a damaged file.
_MAX_EXPERTS: Final = 1 << 12
_MAX_HEADS: Final = 1 << 12


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The config of the model in the hub's format. Raises CheckpointError if it is incomplete or not supported."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES and architecture not in ENCODERS:
        known = ", ".join([*ARCHITECTURES, *ENCODERS])
        raise Unsupported(f"{file.path} has the architecture {str(architecture)[:80]!r}; supported in GGUF: {known}")
    keys = Keys(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise Malformed(f"{file.path} has no token_embd.weight; is the model complete?")
    pooling = gguf_pooling(file, architecture, keys.count("embedding_length"))
    if architecture in ENCODERS:
        return with_pooling(encoder_config(file, architecture, keys), pooling)

    model_type, class_name = ARCHITECTURES[architecture]
    hidden_size = keys.count("embedding_length")
    num_layers = _num_layers(file, keys)
    num_heads = (
        max(keys.counts("attention.head_count", num_layers))
        if architecture in _HEADS_BY_LAYER
        else keys.count("attention.head_count")
    )
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    is_hybrid = architecture in _HYBRIDS
    if rotary_dim % 2 or rotary_dim > head_dim or (rotary_dim < head_dim and architecture not in _PARTIAL):
        raise Unsupported(f"{file.path} rotates {rotary_dim} of {head_dim} dimensions, which is not supported in GGUF")
    rope_theta = keys.number("rope.freq_base", 10000.0)
    is_mixture = architecture in _MIXTURES
    varies = architecture in _BY_LAYER or architecture in _RECURRENT
    if not is_mixture and not varies and file.metadata.get(f"{architecture}.expert_count"):
        raise Unsupported(f"{file.path} is a {architecture} mixture of experts, which is not supported in GGUF")

    num_layers = _num_layers(file, keys)
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(keys, architecture, num_layers, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6 if architecture == "cohere2" else None),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling(file, architecture, rope_theta, rotary_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": "bfloat16",
    }
    if keys.has("nextn_predict_layers") and architecture in HEADED:
        config["num_nextn_predict_layers"] = keys.count("nextn_predict_layers")
    if is_mixture:
        config |= _mixture(keys)
    elif architecture not in _RECURRENT or architecture == "lfm2":
        config["intermediate_size"] = _of_first_layer(keys, architecture, "feed_forward_length")
    if sections := file.metadata.get(f"{architecture}.rope.dimension_sections"):
        config["mrope_section"] = list(sections)[:3]
    if architecture in _PARTIAL:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if is_hybrid:
        config |= _gated_delta(keys)
    if architecture in OPTIONS:
        config |= OPTIONS[architecture](keys, config)
    return with_pooling(config, pooling)


def delta_heads(config: Mapping[str, Any]) -> DeltaHeads | None:
    """The gated delta nets of a config that `config_of` returned; None: the model has none."""
    if "linear_num_key_heads" not in config:
        return None
    return DeltaHeads(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        is_tiled=config["model_type"] in [ARCHITECTURES[architecture][0] for architecture in _TILED],
    )


def _num_layers(file: GGUFFile, keys: Keys) -> int:
    """Without the layers that only predict further tokens, which come last."""
    num_layers = keys.count("block_count")
    extra = keys.count("nextn_predict_layers") if keys.has("nextn_predict_layers") else 0
    if extra >= num_layers:
        raise Malformed(f"{file.path} has {num_layers} layers, {extra} of them for prediction; convert the model again")
    return num_layers - extra


def _num_kv_heads(keys: Keys, architecture: str, num_layers: int, num_heads: int) -> int:
    if architecture in _RECURRENT:
        return keys.count_of_layers("attention.head_count_kv", num_layers, num_heads)
    return _of_first_layer(keys, architecture, "attention.head_count_kv", num_heads)


def _of_first_layer(keys: Keys, architecture: str, name: str, default: int | None = None) -> int:
    return keys.counts(name, 1, default)[0] if architecture in _BY_LAYER else keys.count(name, default)


def _mixture(keys: Keys) -> dict[str, Any]:
    shared = "expert_shared_feed_forward_length"
    return {
        "intermediate_size": keys.count("feed_forward_length", keys.count("expert_feed_forward_length")),
        "num_experts": keys.count("expert_count", limit=_MAX_EXPERTS),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **({"shared_expert_intermediate_size": keys.count(shared)} if keys.has(shared) else {}),
    }


def _gated_delta(keys: Keys) -> dict[str, Any]:
    value_heads, inner = keys.count("ssm.time_step_rank", limit=_MAX_HEADS), keys.count("ssm.inner_size")
    key_heads = keys.count("ssm.group_count", limit=_MAX_HEADS)
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
