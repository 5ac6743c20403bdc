"""Renames, splits and reorders the tensors of a checkpoint into the form that layers read.

Rows are only read in another order or in parts, so all of it works on quantised rows as well. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeGuard

from cortex.neuron.families.family import ModelFamily
from cortex.neuron.families.registry import family_of
from cortex.neuron.weights.delta_heads import DeltaHeads, joint_gates, joint_inputs
from cortex.neuron.weights.errors import Malformed
from cortex.neuron.weights.stored import GROUP, ScaleTensors, StoredTensor

_DELTA_PARTS: Final = {"in_proj_qkvz": joint_inputs, "in_proj_ba": joint_gates}
_JOINT: Final = re.compile(
    r"\.(self_attn\.qkv_proj|mlp\.(shared_expert\.)?gate_up_proj|mlp\.up_gate_proj|linear_attn\.in_proj_(qkvz|ba))\.(weight|bias)$"
)
"""Tensors that hold the rows of several."""
_TEXT_NAMES: Final = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
"""The language model of a checkpoint with a vision tower, as older versions of the reference library wrote it."""
_TOWER: Final = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector|embed_vision|vision_embedder)\.")
"""Tensors of vision towers, which keep their names."""
_BODY: Final = ("embed_tokens.", "layers.", "norm.")
_BIAS_OF_CHOICE: Final = ".mlp.gate.e_score_correction_bias"
_ROTATED: Final = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")


def arranged(config: Mapping[str, Any], stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint in the form that layers read.

    Raises CheckpointError.
    """
    family = family_of(config)
    if family.is_encoder and "model.embed_tokens.weight" not in stored:
        rename, prefix = _encoder_renaming(family), ""
    else:
        # Models that were saved without their head have no prefix.
        rename, prefix = _decoder_renaming(family), "model." if "embed_tokens.weight" in stored else ""
    tensors = {rename(prefix + name if name.startswith(_BODY) else name): tensor for name, tensor in stored.items()}
    if not config.get("num_local_experts", 1):  # without experts the shared one is all of the block
        tensors = {name.replace(".mlp.shared_expert.", ".mlp."): tensor for name, tensor in tensors.items()}
    if len(tensors) < len(stored):
        raise Malformed("the checkpoint has tensors under two names for the same; download it again")
    for name, tensor in tensors.items():
        if name.endswith(_BIAS_OF_CHOICE) and len(tensor.shape) == 2 and tensor.shape[0] == 1:
            tensors[name] = replace(tensor, shape=tensor.shape[1:])
    if family.experts == "interleaved":
        tensors = separated_experts(tensors)
    if family.experts == "by_columns" and _has_columns(config, tensors):
        tensors = separated_experts(tensors, takes_turns=False)
    joint = [name for name in tensors if _JOINT.search(name)]
    if joint:
        heads, sizes = _delta_heads(config), _HeadSizes.read(config, family)
        for name in joint:
            tensors |= _split(name, tensors.pop(name), heads, sizes)
    if family.rotates_neighbours and (sizes := _HeadSizes.read(config, family)) is not None:
        for name in [name for name in tensors if _ROTATED.search(name)]:
            tensors[name] = tensors[name].with_halves_apart(sizes.head_dim, sizes.rotated)
    return tensors


def _decoder_renaming(family: ModelFamily) -> Callable[[str], str]:
    rename = _renaming({**_TEXT_NAMES, **family.tensor_names})

    def renamed(name: str) -> str:
        if (tower := _TOWER.match(name)) is None:
            return rename(name)
        own = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
        return f"model.{own}" if tower[1] is None else own

    return renamed


def _encoder_renaming(family: ModelFamily) -> Callable[[str], str]:
    """Names of a head are unchanged."""
    rename, prefix = _renaming(family.tensor_names), re.compile(f"^(?:{family.tensor_prefix})\\.")

    def renamed(name: str) -> str:
        bare = prefix.sub("", name)
        if bare.startswith(("embeddings.", "encoder.")):  # old checkpoints call the parameters of norms otherwise
            bare = bare.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return rename(bare)

    return renamed


def _renaming(names: Mapping[str, str]) -> Callable[[str], str]:
    """Replaces each part of a name that is in `names`."""
    pattern = re.compile("|".join(("^" if part[0] != "." else "") + re.escape(part) for part in names))
    return lambda name: pattern.sub(lambda match: names[match[0]], name)


def _has_columns(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether stacks of experts have each matrix by columns, as published; newer versions of the reference library
    write them by rows."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    hidden, inner = sizes.get("hidden_size"), sizes.get("moe_intermediate_size")
    downs = (tensor for name, tensor in tensors.items() if name.endswith(".mlp.experts.down_proj"))
    return any(tensor.shape[1:] == (inner, hidden) and inner != hidden for tensor in downs)


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
    def read(cls, config: Mapping[str, Any], family: ModelFamily) -> _HeadSizes | None:
        """None for sizes that are missing or impossible, which the model's architecture rejects."""
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        if not _is_size(heads) or not _is_size(hidden):
            return None
        head_dim = config.get("head_dim") or family.head_dim or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        fraction = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        fraction = fraction or config.get("partial_rotary_factor") or family.rotated_fraction
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


_STACK: Final = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales|)")
_BLOCK_BYTES: Final = GROUP // 2
_MAX_EXPERTS: Final = 1 << 12


def separated_experts(tensors: dict[str, StoredTensor], *, takes_turns: bool = True) -> dict[str, StoredTensor]:
    """The tensors with each expert's matrices in place of the stacks. `takes_turns`: whether the rows of gate and up
    do; otherwise all of gate come first. Raises Malformed."""
    separated: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if match is None:
            separated[name] = tensor
            continue
        experts, part, kind = match.groups()
        num_dims = {"_bias": 2, "": 3, "_blocks": 4, "_scales": 3}[kind]
        is_joint = part == "gate_up"
        if len(tensor.shape) != num_dims or not 0 < tensor.num_rows <= _MAX_EXPERTS:
            raise _malformed(tensor, name, f"has the shape {tensor.shape}")
        if is_joint and tensor.shape[1 if kind else 2] % 2:
            raise _malformed(tensor, name, f"has the shape {tensor.shape}, which is not two equal parts")
        if kind == "_bias":
            separated[f"{experts}.{part}_proj.bias"] = _joint_bias(tensor) if is_joint else tensor
        elif kind == "_blocks":
            scales = tensors.get(f"{experts}.{part}_proj_scales")
            if scales is None:
                raise _malformed(tensor, name, "has no scales")
            separated |= _matrices(f"{experts}.{{}}.{part}_proj.weight", _four_bit(name, tensor, scales), is_joint)
        elif not kind:
            columns, rows = tensor.shape[1:]
            dense = [replace(one, shape=(rows, columns), is_transposed=True) for one in _parts(tensor)]
            separated |= _matrices(f"{experts}.{{}}.{part}_proj.weight", dense, is_joint and takes_turns)
    return separated


def _matrices(pattern: str, experts: list[StoredTensor], is_joint: bool) -> dict[str, StoredTensor]:
    rows = experts[0].num_rows if is_joint else 0
    return {pattern.format(number): replace(one, interleaved_rows=rows) for number, one in enumerate(experts)}


def _parts(stack: StoredTensor) -> list[StoredTensor]:
    """Each expert of a stack."""
    size = stack.num_bytes // stack.num_rows
    one = replace(stack, shape=stack.shape[1:], num_bytes=size)
    return [replace(one, offset=stack.offset + number * size) for number in range(stack.num_rows)]


def _joint_bias(stack: StoredTensor) -> StoredTensor:
    """The biases of all experts, one after another: gate's, then up's of each."""
    experts, rows = stack.shape
    return replace(stack, shape=(experts * rows,), interleaved_rows=rows)


def _four_bit(name: str, blocks: StoredTensor, scales: StoredTensor) -> list[StoredTensor]:
    experts, rows, groups, size = blocks.shape
    if size != _BLOCK_BYTES or blocks.format != "U8":
        raise _malformed(
            blocks, name, f"has blocks {blocks.format} {blocks.shape}, MXFP4 has {_BLOCK_BYTES} bytes each"
        )
    if scales.shape != (experts, rows, groups) or scales.format not in ("U8", "F8_E8M0"):
        raise _malformed(blocks, name, f"has the scales {scales.format} {scales.shape}, MXFP4 needs one for each block")
    return [
        replace(
            codes,
            shape=(rows, groups * GROUP),
            format="MXFP4",
            scales=ScaleTensors(name, "mxfp4", 4, 1, GROUP, scale, None),
        )
        for codes, scale in zip(_parts(blocks), _parts(scales), strict=True)
    ]


def _malformed(tensor: StoredTensor, name: str, reason: str) -> Malformed:
    return Malformed(f"{tensor.file.path}: {name[:200]} {reason}; is it the model that its config describes?")
