"""Models that are small enough for every test: their configs, and random checkpoints of Llama's shape.

A config's own names are used. A test names only the sizes that differ from these or that it depends on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def tiny_sizes(**changes: Any) -> dict[str, Any]:
    """What every family has."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **changes,
    }
    return {"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"], **sizes}


def tiny_delta(**changes: Any) -> dict[str, Any]:
    """Gated delta nets."""
    return {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        **changes,
    }


def tiny_experts(**changes: Any) -> dict[str, Any]:
    return {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        **changes,
    }


def llama_config(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, **tiny_sizes(**changes)}


def llama_weights(config: dict[str, Any], seed: int = 7, std: float = 0.05) -> dict[str, Tensor]:
    """Random matrices; norms of ones."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm": (hidden,),
            f"{block}.self_attn.q_proj": (queries, hidden),
            f"{block}.self_attn.k_proj": (keys, hidden),
            f"{block}.self_attn.v_proj": (keys, hidden),
            f"{block}.self_attn.o_proj": (hidden, queries),
            f"{block}.post_attention_layernorm": (hidden,),
            f"{block}.mlp.gate_proj": (inner, hidden),
            f"{block}.mlp.up_proj": (inner, hidden),
            f"{block}.mlp.down_proj": (hidden, inner),
        }
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * std
        for name, shape in shapes.items()
    }


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_llama(folder: Path, seed: int = 7, std: float = 0.05, **changes: Any) -> Path:
    """A checkpoint of a random Llama; `changes` of its config."""
    config = llama_config(**changes)
    return write_checkpoint(folder, config, llama_weights(config, seed, std))
