"""A real model, small enough to be loaded in every test, and a response of it."""

import json
from pathlib import Path

import torch
from faulty_models import CONFIG
from safetensors.torch import save_file

from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.node.node import Node


def write_llama(folder: Path, seed: int, vocab: int = 1000, num_layers: int = 2, kv_heads: int = 2) -> str:
    hidden, inner, kv = 64, 128, 16 * kv_heads
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    tensors = {
        "model.embed_tokens.weight": random(vocab, hidden),
        "lm_head.weight": random(vocab, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(num_layers):
        block = f"model.layers.{layer}"
        tensors |= {
            f"{block}.input_layernorm.weight": torch.ones(hidden),
            f"{block}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{block}.self_attn.q_proj.weight": random(hidden, hidden),
            f"{block}.self_attn.k_proj.weight": random(kv, hidden),
            f"{block}.self_attn.v_proj.weight": random(kv, hidden),
            f"{block}.self_attn.o_proj.weight": random(hidden, hidden),
            f"{block}.mlp.gate_proj.weight": random(inner, hidden),
            f"{block}.mlp.up_proj.weight": random(inner, hidden),
            f"{block}.mlp.down_proj.weight": random(hidden, inner),
        }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    changes = {"vocab_size": vocab, "num_hidden_layers": num_layers, "rope_theta": 10_000.0}
    changes["num_key_value_heads"] = kv_heads
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def greedy_request(request_id: str, max_tokens: int = 8) -> EngineRequest:
    greedy = SamplingParams(temperature=0.0)
    return EngineRequest(id=request_id, prompt=tuple(range(5, 25)), max_tokens=max_tokens, sampling=greedy)


async def generate(node: Node, model_id: str, request_id: str = "r", max_tokens: int = 8) -> list[int]:
    request = greedy_request(request_id, max_tokens)
    return [token async for batch in node.submit(model_id, request) for output in batch for token in output.tokens]
