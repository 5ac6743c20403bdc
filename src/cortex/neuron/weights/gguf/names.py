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
    "ffn_down_exps": "mlp.experts.down_proj",
}
_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_GLOBAL: Final = re.compile(r"(\w+)\.(weight|bias)")

ROPE_FACTORS: Final = "rope_freqs.weight"
"""Not a weight but a table, which the config expresses as `rope_scaling`."""


def hub_name(name: str) -> str:
    """The hub's name of GGUF tensor `name`. The stack of all experts of a layer has no expert number.

    Raises Unsupported for an unknown tensor: dropping it would change the output of the model.
    """
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _PER_LAYER:
            return f"model.layers.{int(layer)}.{_PER_LAYER[part]}.{kind}"
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


def expert_name(stack_name: str, expert: int) -> str:
    """`….experts.gate_proj.weight` → `….experts.7.gate_proj.weight`."""
    return stack_name.replace(".mlp.experts.", f".mlp.experts.{expert}.")
