"""What a converter does to the tensors of a model: other names, orders and values, in a format of GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

INTERLEAVED = ("granite", "llama", "mistral3", "muse-glimmer", "smollm3")
"""Architectures whose converters put the two rows of a rotary pair side by side."""
_SCALE_BYTES = {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
_GEMMA4_NAMES = {
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def converted(
    source: str, tensor: Tensor, config: Any, architecture: str, names: gguf.TensorNameMap, layer: str
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file that one parameter becomes."""

    def name_of(hub_name: str) -> str:
        found = names.get_name(hub_name, try_suffixes=(".weight", ".bias"))
        assert found is not None, hub_name
        return found

    is_hybrid = architecture in ("qwen3next", "qwen35", "qwen35moe")
    if architecture in ("qwen35", "qwen35moe") and "linear_attn." in source:
        tensor = _tiled(source, tensor, config)
    if source.endswith("A_log"):
        yield f"blk.{layer}.ssm_a", -torch.exp(tensor)
    elif source.endswith("e_score_correction_bias"):
        yield f"blk.{layer}.exp_probs_b.bias", tensor.flatten()
    elif source.endswith("dt_bias"):
        yield f"blk.{layer}.ssm_dt.bias", tensor
    elif "conv1d" in source:
        yield name_of(source), tensor.squeeze(1)
    elif is_hybrid and source.endswith("norm.weight") and not source.endswith("linear_attn.norm.weight"):
        yield name_of(source), tensor + 1
    elif "in_proj_qkvz" in source:
        parts = _by_part(tensor, config)
        yield f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3])
        yield f"blk.{layer}.attn_gate.weight", parts[3]
    elif architecture == "gemma4" and (own := _GEMMA4_NAMES.get(source.split(".", 3)[-1])) is not None:
        yield f"blk.{layer}.{own}", tensor
    elif architecture == "gpt-oss" and ".experts." in source:
        kind = "bias" if source.endswith("_bias") else "weight"
        by_row = tensor if kind == "bias" else tensor.transpose(1, 2)
        by_part = {"down": by_row} if ".down_proj" in source else {"gate": by_row[:, ::2], "up": by_row[:, 1::2]}
        for part, rows in by_part.items():
            yield f"blk.{layer}.ffn_{part}_exps.{kind}", rows.contiguous()
    elif ".experts.gate_up_proj" in source:
        gate, up = tensor.chunk(2, dim=1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
    elif ".experts.down_proj" in source:
        yield f"blk.{layer}.ffn_down_exps.weight", tensor
    elif ".shared_experts." in source and architecture == "laguna":
        yield f"blk.{layer}.ffn_{source.split('.')[-2].removesuffix('_proj')}_shexp.weight", tensor
    elif source.endswith(("self_attn.g_proj.weight", "self_attn.gate_proj.weight")):
        yield f"blk.{layer}.attn_gate.weight", tensor
    elif architecture == "muse-glimmer" and source == "model.norm.weight":
        yield "output_norm.weight", tensor
    elif architecture in ("gemma3", "muse-glimmer") and source.endswith("norm.weight"):
        yield name_of(source), tensor + 1
    elif architecture in INTERLEAVED and (".q_proj." in source or ".k_proj." in source):
        heads = config.num_attention_heads if ".q_proj." in source else config.num_key_value_heads
        yield name_of(source), tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    elif source.endswith(".sinks"):
        yield f"blk.{layer}.attn_sinks.weight", tensor
    elif ".kv_b_proj." in source:
        heads = tensor.unflatten(0, (config.num_attention_heads, -1))
        yield f"blk.{layer}.attn_k_b.weight", heads[:, : config.qk_nope_head_dim].transpose(1, 2)
        yield f"blk.{layer}.attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    elif "shared_expert_gate" in source:
        yield name_of(source), tensor.squeeze(0)
    else:
        yield name_of(source), tensor


def _tiled(source: str, tensor: Tensor, config: Any) -> Tensor:
    """Value heads from the order of their key heads to the first of every key head, the second of every key head, …"""
    key_size = config.linear_num_key_heads * config.linear_key_head_dim
    width = config.linear_value_head_dim

    def tile(part: Tensor, dim: int, width: int) -> Tensor:
        split = (config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads, width)
        heads: Tensor = part.unflatten(dim, split)
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if "in_proj_qkv." in source or "conv1d" in source:
        return torch.cat((tensor[: 2 * key_size], tile(tensor[2 * key_size :], 0, width)))
    if "in_proj_z." in source:
        return tile(tensor, 0, width)
    if "out_proj" in source:
        return tile(tensor, 1, width)
    return tensor if "norm" in source else tile(tensor, 0, 1)


def _by_part(tensor: Tensor, config: Any) -> list[Tensor]:
    """Rows that are grouped by key head, by part: q, k, v, z."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, values, values]
    return [part.flatten(0, 1) for part in tensor.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, dim=1)]


def encoded(tensor: Tensor, format_name: str) -> tuple[np.ndarray, Tensor]:
    """The bytes of a tensor in a format, and the values that they stand for."""
    kind = gguf.GGMLQuantizationType[format_name]
    values = tensor.numpy().astype(np.float32)
    if format_name in _SCALE_BYTES:  # the package only decodes these: random blocks with small scales
        elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(values.size)
        data = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // elements, num_bytes), dtype=np.uint8)
        for at in _SCALE_BYTES[format_name]:
            scales = random.uniform(2e-5, 1e-4, data.shape[:-1]).astype(np.float16)
            data[..., at : at + 2] = scales[..., None].view(np.uint8)
        data = data.reshape(*values.shape[:-1], -1)
    else:
        data = gguf.quantize(values.reshape(1, -1), kind).reshape(*values.shape[:-1], -1)
    decoded = gguf.dequantize(data.reshape(1, -1), kind)  # as one row: the package takes 16 rows at a time, slowly
    return data, torch.from_numpy(decoded.astype(np.float32).reshape(values.shape).copy())
