"""A random Llama of a few megabytes, written without another library's model classes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 256, 512, 512, 2, 4, 2


def write_small_llama(folder: Path) -> Path:
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    kv = HIDDEN // NUM_HEADS * NUM_KV_HEADS
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(NUM_LAYERS):
        block = f"model.layers.{layer}"
        norms += [f"{block}.input_layernorm", f"{block}.post_attention_layernorm"]
        shapes |= {
            f"{block}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{block}.self_attn.k_proj": (kv, HIDDEN),
            f"{block}.self_attn.v_proj": (kv, HIDDEN),
            f"{block}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{block}.mlp.gate_proj": (INNER, HIDDEN),
            f"{block}.mlp.up_proj": (INNER, HIDDEN),
            f"{block}.mlp.down_proj": (HIDDEN, INNER),
        }
    generator = torch.Generator().manual_seed(7)
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(weights, folder / "model.safetensors")
    return folder
