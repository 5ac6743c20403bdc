"""The tensors of a checkpoint as layers read them, whatever its family calls them, joins in one tensor or interleaves.

Rows are only read in another order or in parts, so all of it works on quantised rows as well. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeGuard

from cortex.neuron.weights.delta_heads import DeltaHeads, joint_gates, joint_inputs
from cortex.neuron.weights.encoder_tensors import encoder_name, is_encoder
from cortex.neuron.weights.errors import Malformed
from cortex.neuron.weights.interleaved_experts import separated_experts
from cortex.neuron.weights.stored import StoredTensor

_DELTA_PARTS: Final = {"in_proj_qkvz": joint_inputs, "in_proj_ba": joint_gates}
_JOINT: Final = re.compile(
    r"\.(self_attn\.qkv_proj|mlp\.(shared_expert\.)?gate_up_proj|mlp\.up_gate_proj|linear_attn\.in_proj_(qkvz|ba))\.(weight|bias)$"
)
"""Tensors that hold the rows of several."""
_OWN_NAMES: Final = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    ".self_attn.query_layernorm.": ".self_attn.q_norm.",
    ".self_attn.key_layernorm.": ".self_attn.k_norm.",
    ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.": ".mlp.",
    ".shared_mlp.input_linear.": ".mlp.shared_expert.gate_up_proj.",
    ".shared_mlp.output_linear.": ".mlp.shared_expert.down_proj.",
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".mlp.moe_statics.": ".mlp.gate.",
    ".mlp.gate.moe_statics.": ".mlp.gate.",
    ".mlp.router.": ".mlp.gate.",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
    ".router.proj.": ".mlp.gate.",
    ".router.scale": ".mlp.gate.input_scale",
    ".router.per_expert_scale": ".mlp.gate.expert_scale",
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
    ".feed_forward.": ".mlp.",
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.layers.": "model.layers.",
    **{f".mixer.{part}": f".self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{
        f".mixer.{part}": f".mamba.{part}"
        for part in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
    },
    ".mixer.shared_experts.": ".mlp.shared_expert.",
    ".mixer.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}
"""Parts of names in published checkpoints → what layers call them."""
_TOWER: Final = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector|embed_vision|vision_embedder)\.")
"""Tensors of vision towers, which keep their names."""
_BODY: Final = ("embed_tokens.", "layers.", "norm.")
_NAMES: Final = re.compile("|".join(("^" if name[0] != "." else "") + re.escape(name) for name in _OWN_NAMES))
_PARALLEL_EXPERTS: Final = re.compile(r"(\.layers\.\d+)\.experts\.")
"""Experts parallel to a feed-forward block, which layers have in that block."""
_BIAS_OF_CHOICE: Final = ".mlp.gate.e_score_correction_bias"
_INTERLEAVED: Final = frozenset({"cohere2", "ernie4_5", "ernie4_5_moe", "glm4"})
"""Families that rotate pairs of adjacent dimensions; here the two halves of the rotated dimensions are pairs."""
_ROTATED: Final = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")
_HEAD_DIMS: Final = {"ernie4_5": 128, "glm4": 128}
_FRACTIONS: Final = {"glm4": 0.5}
"""What configs leave out."""


def arranged(config: Mapping[str, Any], stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint as layers read them, whatever its family calls them and has in one tensor.

    Raises CheckpointError.
    """
    model_type = str(config.get("model_type"))
    if is_encoder(model_type) and "model.embed_tokens.weight" not in stored:
        tensors = {encoder_name(model_type, name): tensor for name, tensor in stored.items()}
    else:
        # Models that were saved without their head have no prefix.
        prefix = "model." if "embed_tokens.weight" in stored else ""
        tensors = {
            _arranged_name(prefix + name if name.startswith(_BODY) else name): tensor for name, tensor in stored.items()
        }
    if model_type == "granitemoehybrid" and not config.get("num_local_experts", 1):
        tensors = {name.replace(".mlp.shared_expert.", ".mlp."): tensor for name, tensor in tensors.items()}
    if len(tensors) < len(stored):
        raise Malformed("the checkpoint has tensors under two names for the same; download it again")
    for name, tensor in tensors.items():
        if name.endswith(_BIAS_OF_CHOICE) and len(tensor.shape) == 2 and tensor.shape[0] == 1:
            tensors[name] = replace(tensor, shape=tensor.shape[1:])
    if config.get("model_type") == "gpt_oss":
        tensors = separated_experts(tensors)
    if config.get("model_type") == "qwen3_vl_moe" and _has_columns(config, tensors):
        tensors = separated_experts(tensors, takes_turns=False)
    joint = [name for name in tensors if _JOINT.search(name)]
    if joint:
        heads, sizes = _delta_heads(config), _HeadSizes.read(config)
        for name in joint:
            tensors |= _split(name, tensors.pop(name), heads, sizes)
    if str(config.get("model_type")) in _INTERLEAVED and (sizes := _HeadSizes.read(config)) is not None:
        for name in [name for name in tensors if _ROTATED.search(name)]:
            tensors[name] = tensors[name].with_halves_apart(sizes.head_dim, sizes.rotated)
    return tensors


def _arranged_name(name: str) -> str:
    if (tower := _TOWER.match(name)) is not None:
        own = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
        return f"model.{own}" if tower[1] is None else own
    return _PARALLEL_EXPERTS.sub(r"\1.mlp.experts.", _NAMES.sub(_own_name, name))


def _has_columns(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether stacks of experts have each matrix by columns, as published; newer versions of the reference library
    write them by rows."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    hidden, inner = sizes.get("hidden_size"), sizes.get("moe_intermediate_size")
    downs = (tensor for name, tensor in tensors.items() if name.endswith(".mlp.experts.down_proj"))
    return any(tensor.shape[1:] == (inner, hidden) and inner != hidden for tensor in downs)


def _own_name(match: re.Match[str]) -> str:
    return _OWN_NAMES[match[0]]


def _split(
    name: str, tensor: StoredTensor, heads: DeltaHeads | None, sizes: _HeadSizes | None
) -> dict[str, StoredTensor]:
    """The parts of a tensor that holds several, by name; itself where the config does not fit it, which the load of the
    model then rejects."""
    matrix, _, kind = name.rpartition(".")
    block, _, part = matrix.rpartition(".")
    if part in _DELTA_PARTS:
        made = {} if heads is None else _DELTA_PARTS[part](tensor, heads)
        return {f"{block}.{own}": parts for own, parts in made.items()} or {name: tensor}
    halves = ("up_proj", "gate_proj") if part == "up_gate_proj" else ("gate_proj", "up_proj")
    rows: Mapping[str, int] = dict.fromkeys(halves, tensor.num_rows // 2)
    if part == "qkv_proj":
        rows = {} if sizes is None else sizes.rows
    if sum(rows.values()) != tensor.num_rows:
        return {name: tensor}
    parts, first = {}, 0
    for own, count in rows.items():
        parts[f"{block}.{own}.{kind}"] = tensor.with_rows((range(first, first + count),))
        first += count
    return parts


@dataclass(frozen=True, slots=True)
class _HeadSizes:
    """The rows of queries, keys and values, and those of each head that rotate."""

    head_dim: int
    rows: Mapping[str, int]
    rotated: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _HeadSizes | None:
        """None for sizes that are missing or impossible, which the model's architecture rejects."""
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        if not _is_size(heads) or not _is_size(hidden):
            return None
        head_dim = config.get("head_dim") or _HEAD_DIMS.get(str(config.get("model_type"))) or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        fraction = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        fraction = fraction or config.get("partial_rotary_factor") or _FRACTIONS.get(str(config.get("model_type")), 1.0)
        if not _is_size(head_dim) or not _is_size(kv_heads) or type(fraction) not in (int, float):
            return None
        if not 0 < fraction <= 1:
            return None
        rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        return cls(head_dim, rows, int(head_dim * fraction))


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << 20


def _delta_heads(config: Mapping[str, Any]) -> DeltaHeads | None:
    """None for sizes that are missing or impossible, which the model's architecture rejects."""
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes = [config.get(key) for key in keys]
    counts = [size for size in sizes if _is_size(size)]
    if len(counts) < len(keys) or counts[1] % counts[0]:
        return None
    return DeltaHeads(counts[0], counts[1], counts[2], counts[3], is_tiled=False)
