"""Maps GGUF tensor names to the hub's names."""

from __future__ import annotations

import re
from typing import Final

from cortex.neuron.families.gguf import GGUFArchitecture
from cortex.neuron.families.registry import GGUF
from cortex.neuron.weights.errors import Unsupported
from cortex.neuron.weights.gguf.encoders import encoder_tensor

_WHOLE_MODEL: Final = {
    "token_embd": "model.embed_tokens",
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
_MTP_HEAD: Final = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head_norm": "mtp.norm",
}
_HEAD_PART: Final = re.compile(r"nextn\.(\w+)\.weight")


def head_tensor(name: str, architecture: GGUFArchitecture, layer: int, part: str) -> str:
    """The hub's name of a tensor in the head that predicts further tokens, which files have as the layer after the last
    one. Raises Unsupported for an unknown tensor."""
    own = f"model.layers.{layer}"
    if match := _HEAD_PART.fullmatch(part):
        names = _MTP_HEAD if architecture.head == "mtp" else {key: f"{own}.{to}" for key, to in _OF_HEAD.items()}
        if match[1] not in names:
            raise Unsupported(f"the GGUF file has a tensor {name[:200]!r} in its prediction head, which is unknown")
        return f"{names[match[1]]}.weight"
    found = hub_name(name, architecture.name)
    return found.replace(f"{own}.", "mtp.layers.0.") if architecture.head == "mtp" else found


def layer_part(name: str) -> tuple[int, str] | None:
    """The layer of a tensor and its name there, `"blk.3.ssm_a"` → `(3, "ssm_a")`; None: it belongs to no layer."""
    match = _IN_LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def hub_name(name: str, architecture: str = "llama") -> str:
    """The hub's name of GGUF tensor `name`. The stack of all experts of a layer has no expert number.

    Raises Unsupported for an unknown tensor: dropping it would change the output of the model.
    """
    stored = GGUF[architecture]
    if stored.family.is_encoder:
        return encoder_tensor(name, stored.architecture)
    if name in _OF_POOLING:
        return name
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        if (whole := _WHOLE_NAMES.get(f"{part}.{kind}")) is not None:
            return f"model.layers.{int(layer)}.{whole}"
        own = None if kind == "scale" else stored.architecture.tensor_names.get(part) or _PER_LAYER.get(part)
        if own is not None:
            return f"model.layers.{int(layer)}.{own}.{kind}"
    elif match := _GLOBAL.fullmatch(name):
        part, kind = match.groups()
        if part == stored.architecture.last_norm:
            return f"model.norm.{kind}"
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
