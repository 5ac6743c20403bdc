"""Maps GGUF tensor names to the hub's names."""

from __future__ import annotations

import re
from typing import Final

from cortex.neuron.weights.errors import Unsupported

_WHOLE_MODEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
_PER_HYBRID_LAYER: Final = {
    **{part: name for part, name in _PER_LAYER.items() if part != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""In models with gated delta nets, whose own tensors `delta.py` names."""
_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_IN_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.(.+)")
_GLOBAL: Final = re.compile(r"(\w+)\.(weight|bias)")

ROPE_FACTORS: Final = "rope_freqs.weight"
"""Not a weight but a table, which the config expresses as `rope_scaling`."""


def layer_part(name: str) -> tuple[int, str] | None:
    """The layer of a tensor and its name there, `"blk.3.ssm_a"` → `(3, "ssm_a")`; None: it belongs to no layer."""
    match = _IN_LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def hub_name(name: str, *, is_hybrid: bool = False) -> str:
    """The hub's name of GGUF tensor `name`. The stack of all experts of a layer has no expert number.

    Raises Unsupported for an unknown tensor: dropping it would change the output of the model.
    """
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        known = _PER_HYBRID_LAYER if is_hybrid else _PER_LAYER
        if part in known:
            return f"model.layers.{int(layer)}.{known[part]}.{kind}"
    elif match := _GLOBAL.fullmatch(name):
        part, kind = match.groups()
        if part in _WHOLE_MODEL:
            return f"{_WHOLE_MODEL[part]}.{kind}"
    raise Unsupported(
        f"the GGUF file has a tensor {name[:200]!r} that no supported model family uses; use a safetensors model"
    )


def is_expert_stack(hub_tensor_name: str) -> bool:
    """Whether the tensor holds all experts of a layer, `[experts, out, in]`."""
    return ".mlp.experts." in hub_tensor_name


def expert_names(stack_name: str) -> tuple[str, ...]:
    """The tensors of one expert in a stack, in order, with a place for its number.

    `….experts.gate_proj.weight` → `….experts.{}.gate_proj.weight`
    """
    prefix, _, part = stack_name.partition(".mlp.experts.")
    parts = ("gate_proj.weight", "up_proj.weight") if part == "gate_up_proj.weight" else (part,)
    return tuple(f"{prefix}.mlp.experts.{{}}.{part}" for part in parts)
