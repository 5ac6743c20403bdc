"""Maps GGUF tensor names to the hub's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from cortex.neuron.weights.errors import Unsupported
from cortex.neuron.weights.gguf.encoders import ENCODERS, encoder_tensor

_WHOLE_MODEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PER_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED: Final = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_HYBRID: Final = {
    **_SHARED,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
"""In models with gated delta nets, whose own tensors `delta.py` names."""
_AFTER_BLOCKS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OWN_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "deepseek2": {
        **_SHARED,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    },
    "ernie4_5-moe": _SHARED,
    "exaone4": _AFTER_BLOCKS,
    "gemma-embedding": {**_AFTER_BLOCKS, "ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {**_AFTER_BLOCKS, "ffn_norm": "pre_feedforward_layernorm"},
    "gemma4": {
        **_AFTER_BLOCKS,
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    "glm4": {
        **_FUSED,
        "ffn_norm": "post_attention_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "laguna": {**_SHARED, "attn_gate": "self_attn.g_proj"},
    "granitehybrid": _SHARED,
    "nemotron_h": {"attn_norm": "norm"},
    "nemotron_h_moe": {
        **_SHARED,
        "attn_norm": "norm",
        "ffn_latent_down": "mlp.fc1_latent_proj",
        "ffn_latent_up": "mlp.fc2_latent_proj",
    },
    "muse-glimmer": {
        **_AFTER_BLOCKS,
        "ffn_norm": "pre_feedforward_layernorm",
        "attn_gate": "self_attn.gate_proj",
    },
    "glm4moe": {**_SHARED, "post_attention_norm": "post_attention_layernorm"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm"},
    "olmo2": _AFTER_BLOCKS,
    "phi3": _FUSED,
    "qwen3next": _HYBRID,
    "qwen35": _HYBRID,
    "qwen35moe": _HYBRID,
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
"""Architecture → tensors of a layer that have another meaning than in Llama, or that Llama lacks."""
_LAST_NORM_IS_CALLED_FIRST: Final = frozenset({"lfm2", "lfm2moe"})
"""Architectures whose files call the last norm that of the embedding."""
_OF_POOLING: Final = frozenset({"dense_2.weight", "dense_3.weight", "cls.output.weight", "cls.output.bias"})
_WHOLE_NAMES: Final = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp.scale": "mlp.gate.input_scale",
    "ffn_down_exps.scale": "mlp.gate.expert_scale",
    "layer_output_scale.weight": "layer_scalar",
}
"""Tensors of a layer whose names have no ending on the hub."""
_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias|scale)")
_IN_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.(.+)")
_GLOBAL: Final = re.compile(r"(\w+)\.(weight|bias)")

ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
ROPE_TABLES: Final = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
"""Not weights but tables, which the config expresses as `rope_scaling`."""


_OF_HEAD: Final = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head_norm": "shared_head.norm",
    "embed_tokens": "embed_tokens",
    "shared_head_head": "shared_head.head",
}
"""What a head that predicts further tokens has besides a layer."""
_QWEN_HEAD: Final = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head_norm": "mtp.norm",
}
_QWEN_HEADS: Final = frozenset({"qwen3next", "qwen35", "qwen35moe"})
"""Architectures whose head is published together with the layers."""
_HEAD_PART: Final = re.compile(r"nextn\.(\w+)\.weight")


def head_tensor(name: str, architecture: str, layer: int, part: str) -> str:
    """The hub's name of a tensor in the head that predicts further tokens, which files have as the layer after the last
    one. Raises Unsupported for an unknown tensor."""
    own = f"model.layers.{layer}"
    if match := _HEAD_PART.fullmatch(part):
        names = _QWEN_HEAD if architecture in _QWEN_HEADS else {key: f"{own}.{to}" for key, to in _OF_HEAD.items()}
        if match[1] not in names:
            raise Unsupported(f"the GGUF file has a tensor {name[:200]!r} in its prediction head, which is unknown")
        return f"{names[match[1]]}.weight"
    found = hub_name(name, architecture)
    return found.replace(f"{own}.", "mtp.layers.0.") if architecture in _QWEN_HEADS else found


def layer_part(name: str) -> tuple[int, str] | None:
    """The layer of a tensor and its name there, `"blk.3.ssm_a"` → `(3, "ssm_a")`; None: it belongs to no layer."""
    match = _IN_LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def hub_name(name: str, architecture: str = "llama") -> str:
    """The hub's name of GGUF tensor `name`. The stack of all experts of a layer has no expert number.

    Raises Unsupported for an unknown tensor: dropping it would change the output of the model.
    """
    if architecture in ENCODERS:
        return encoder_tensor(name, architecture)
    if name in _OF_POOLING:
        return name
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        if (whole := _WHOLE_NAMES.get(f"{part}.{kind}")) is not None:
            return f"model.layers.{int(layer)}.{whole}"
        own = None if kind == "scale" else _OWN_NAMES.get(architecture, {}).get(part) or _PER_LAYER.get(part)
        if own is not None:
            return f"model.layers.{int(layer)}.{own}.{kind}"
    elif match := _GLOBAL.fullmatch(name):
        part, kind = match.groups()
        if part == "token_embd_norm" and architecture in _LAST_NORM_IS_CALLED_FIRST:
            part = "output_norm"
        if part in _WHOLE_MODEL:
            return f"{_WHOLE_MODEL[part]}.{kind}"
    raise Unsupported(
        f"the GGUF file has a tensor {name[:200]!r} that no supported model family uses; use a safetensors model"
    )


def is_expert_stack(hub_tensor_name: str) -> bool:
    """Whether the tensor holds all experts of a layer, `[experts, out, in]`."""
    return ".mlp.experts." in hub_tensor_name and hub_tensor_name.endswith(".weight")


def expert_names(stack_name: str) -> tuple[str, ...]:
    """The tensors of one expert in a stack, in order, with a place for its number.

    `….experts.gate_proj.weight` → `….experts.{}.gate_proj.weight`
    """
    prefix, _, part = stack_name.partition(".mlp.experts.")
    parts = ("gate_proj.weight", "up_proj.weight") if part == "gate_up_proj.weight" else (part,)
    return tuple(f"{prefix}.mlp.experts.{{}}.{part}" for part in parts)
