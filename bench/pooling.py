"""Benchmarks an embedding model in the engine without a server: random weights of BGE-M3's shape, or a checkpoint.

    PYTHONPATH=src python bench/pooling.py --texts 512 --tokens 512 --json out.json
    PYTHONPATH=src python bench/pooling.py --checkpoint DIR --device cpu --texts 32 --tokens 128 --peer

The limit is the rate of a large bf16 GEMM in the same run; the model's own FLOPs count: two for each weight and token,
and four for each pair of tokens, dimension and layer in attention. `--peer` runs the same texts through the reference
library, 32 at a time. `--http URL --model ID` measures a running node or gateway instead, with base64.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cortex.neuron.engine.loading import build_model
from cortex.neuron.engine.parallel.ranks import load_engine
from cortex.neuron.engine.pooling.engine import PoolingEngine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, PooledTexts
from cortex.neuron.layers.parameters import Parameters

BGE_M3: dict[str, Any] = {
    "model_type": "xlm-roberta",
    "vocab_size": 250_002,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "pooling": {"task": "embed", "modes": ["cls"], "steps": [("normalize", {})]},
}
GEMM_SIZE = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--http", metavar="URL")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.http:
        result = {"http_tokens_per_s": http_rate(options.http, options.model, options.texts, options.tokens)}
    else:
        result = engine_rates(options)
    for name, value in result.items():
        print(f"{name:28} {value:,.4g}")
    if options.json:
        options.json.write_text(json.dumps(result))


def engine_rates(options: argparse.Namespace) -> dict[str, float]:
    device = torch.device(options.device)
    engine = loaded(options.checkpoint, device)
    config = engine.pooled.config
    generator = np.random.default_rng(0)
    ids = generator.integers(4, config.vocab, options.texts * options.tokens).astype(np.uint32)
    texts = PooledTexts(ids.tobytes(), (options.tokens,) * options.texts)
    best_s, longest_s = min((timed(engine, texts) for _ in range(options.repeats + 1)), key=lambda pair: pair[0])
    num_tokens = options.texts * options.tokens
    layers = engine.pooled.architecture.layers
    weights = sum(_layer_weights(layer) for layer in layers)
    attention = sum(4 * options.tokens * layer.mixer.heads * layer.mixer.head_dim for layer in layers)  # type: ignore[union-attr]
    flops = num_tokens * (2 * weights + attention) / best_s
    result = {"tokens_per_s": num_tokens / best_s, "tflops": flops / 1e12, "longest_step_ms": longest_s * 1e3}
    if device.type == "cuda":
        limit = gemm_flops(device)
        result |= {"limit_tflops": limit / 1e12, "share_of_limit": flops / limit}
    if options.peer:
        peer_s = peer_seconds(options.checkpoint, ids.reshape(options.texts, options.tokens), device)
        result |= {"peer_tokens_per_s": num_tokens / peer_s, "times_peer": peer_s / best_s}
    return result


def _layer_weights(layer: Any) -> int:
    mixer, block = layer.mixer, layer.feed_forward
    heads = (2 * mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
    return int(mixer.hidden * heads + block.hidden * block.inner * (3 if block.gated else 2))


def loaded(checkpoint: Path | None, device: torch.device) -> PoolingEngine:
    if checkpoint is not None:
        engine = load_engine(LoadSpec(str(checkpoint)), device, lambda *_: None, lambda: False)
        assert isinstance(engine, PoolingEngine), "the checkpoint generates text"
        return engine

    def fill(parameters: Parameters) -> None:
        for binding in parameters.bindings:
            binding.destination.normal_(std=0.02)

    spec = LoadSpec("bge-m3")
    return PoolingEngine(build_model(BGE_M3, spec, device, fill), spec)


def timed(engine: PoolingEngine, texts: PooledTexts) -> tuple[float, float]:
    """The seconds of one request, and of its longest step."""
    engine.submit(EngineRequest("r", (), 0, texts=texts))
    began_s = time.perf_counter()
    longest_s = 0.0
    while engine.has_work:
        step_s = time.perf_counter()
        engine.step()
        longest_s = max(longest_s, time.perf_counter() - step_s)
    return time.perf_counter() - began_s, longest_s


def gemm_flops(device: torch.device) -> float:
    one = torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device)
    best_s = float("inf")
    for _ in range(10):
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        torch.mm(one, one)
        torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * GEMM_SIZE**3 / best_s


def peer_seconds(checkpoint: Path, ids: np.ndarray[Any, Any], device: torch.device) -> float:
    import transformers

    model = transformers.AutoModel.from_pretrained(checkpoint).to(device).eval()
    batches = torch.from_numpy(ids.astype(np.int64)).to(device).split(32)
    best_s = float("inf")
    with torch.inference_mode():
        for _ in range(2):
            began_s = time.perf_counter()
            for batch in batches:
                model(batch)
            best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def http_rate(url: str, model: str, num_texts: int, num_tokens: int) -> float:
    """Tokens per second of four clients that send the texts, 64 in a request."""
    words = np.random.default_rng(0).choice(["red", "blue", "cat", "dog", "tree", "stone"], (num_texts, num_tokens))
    texts = [" ".join(row) for row in words]

    def send(part: list[str]) -> int:
        body = {"model": model, "input": part, "encoding_format": "base64", "truncate_prompt_tokens": num_tokens}
        request = urllib.request.Request(
            f"{url}/v1/embeddings", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return int(json.loads(response.read())["usage"]["prompt_tokens"])

    parts = [texts[first : first + 64] for first in range(0, len(texts), 64)]
    send(parts[0])
    with ThreadPoolExecutor(4) as pool:
        began_s = time.perf_counter()
        total = sum(pool.map(send, parts))
    return total / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
