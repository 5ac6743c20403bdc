"""Benchmarks an embedding model: random weights of BGE-M3's shape, or a checkpoint.

    PYTHONPATH=src python bench/pooling.py --http --profile --json out.json
    PYTHONPATH=src python bench/pooling.py --checkpoint DIR --device cpu --texts 32 --tokens 128 --peer

The limit is the rate of a large bf16 GEMM in the same run; the model's own FLOPs count: two for each weight and token,
and four for each pair of tokens, dimension and layer in attention. `--http` also starts a node with the same model, and
compares what clients get as base64 with the engine's rate. `--peer` runs the same texts through Sentence Transformers,
in turns with the engine. `--mixed` cuts the texts to lengths between an eighth and all of `--tokens`. `--profile`
prints the kernels that take the most time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.parallel.ranks import load_engine
from cortex.neuron.engine.pooling.engine import PoolingEngine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, PooledTexts
from cortex.neuron.layers.parameters import Parameters
from daemon import Neuron, running_neuron
from encoder_checkpoint import BGE_M3, POOLING, TINY, texts_of, write_encoder
from engine import matrix_limit

SHAPES = {"bge-m3": BGE_M3, "tiny": TINY}
TEXTS_PER_REQUEST = 64
NUM_CLIENTS = 8
HTTP_ROUNDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="bge-m3")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.peer and options.checkpoint is None:
        parser.error("--peer needs --checkpoint")
    result = engine_rates(options)
    if options.http:
        result |= http_rates(options, result["tokens_per_s"])
    for name, value in result.items():
        print(f"{name:28} {value:,.4g}")
    if options.json:
        options.json.write_text(json.dumps(result))


def engine_rates(options: argparse.Namespace) -> dict[str, float]:
    device = torch.device(options.device)
    engine = loaded(options.checkpoint, SHAPES[options.shape], device)
    random = np.random.default_rng(0)
    shortest = max(1, options.tokens // 8) if options.mixed else options.tokens
    lengths = random.integers(shortest, options.tokens + 1, options.texts).tolist()
    ids = [random.integers(4, engine.pooled.config.vocab, length) for length in lengths]
    texts = PooledTexts(np.concatenate(ids).astype(np.uint32).tobytes(), tuple(lengths))
    peer = Peer(options.checkpoint, ids, device) if options.peer else None
    best_s, longest_s = timed(engine, texts)  # also a warm-up
    best_s = peer_s = float("inf")
    for _ in range(options.repeats):
        took_s, step_s = timed(engine, texts)
        best_s, longest_s = min((best_s, longest_s), (took_s, step_s))
        if peer is not None:
            peer_s = min(peer_s, peer.seconds())
    num_tokens = sum(lengths)
    pairs = sum(length * length for length in lengths)
    layers = engine.pooled.architecture.layers
    weights = sum(_layer_weights(layer) for layer in layers)
    attention = sum(_attention_width(layer) for layer in layers)
    flops = (2 * weights * num_tokens + 4 * attention * pairs) / best_s
    result = {"tokens_per_s": num_tokens / best_s, "tflops": flops / 1e12, "longest_step_ms": longest_s * 1e3}
    if device.type == "cuda":
        limit = matrix_limit(device)
        result |= {"limit_tflops": limit / 1e12, "share_of_limit": flops / limit}
    if peer is not None:
        result |= {"peer_tokens_per_s": num_tokens / peer_s, "times_peer": peer_s / best_s}
    if options.profile:
        print_profile(engine, texts, device)
    engine.close()
    return result


def _layer_weights(layer: Any) -> int:
    mixer, block = layer.mixer, layer.feed_forward
    heads = (2 * mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
    return int(mixer.hidden * heads + block.hidden * block.inner * (3 if block.gated else 2))


def _attention_width(layer: Any) -> int:
    return int(layer.mixer.heads * layer.mixer.head_dim)


def loaded(checkpoint: Path | None, shape: dict[str, Any], device: torch.device) -> PoolingEngine:
    if checkpoint is not None:
        engine = load_engine(LoadSpec(str(checkpoint)), device, lambda *_: None, lambda: False)
        assert isinstance(engine, PoolingEngine), "the checkpoint generates text"
        return engine

    def fill(parameters: Parameters) -> None:
        for binding in parameters.bindings:
            values = binding.destination
            values.normal_(1.0, 0.1) if values.ndim == 1 else values.normal_(std=values.shape[-1] ** -0.5)

    spec = LoadSpec("bge-m3")
    return PoolingEngine(build_model({**shape, "pooling": POOLING}, spec, device, fill), spec)


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


def print_profile(engine: PoolingEngine, texts: PooledTexts, device: torch.device) -> None:
    """The operations of one request by the time of the device, and how long the device had nothing to do."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        took_s, _ = timed(engine, texts)
    events = profile.key_averages()
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(events.table(sort_by=key, row_limit=25, max_name_column_width=90))
    if device.type == "cuda":
        busy_s = sum(event.self_device_time_total for event in events) / 1e6
        print(f"profiled request: {took_s * 1e3:.1f} ms, kernels {busy_s * 1e3:.1f} ms")


class Peer:
    """The same texts in Sentence Transformers, in its usual batches of 32 by length; on a CPU in float32, which is the
    fastest dtype of most of them."""

    def __init__(self, checkpoint: Path, ids: list[np.ndarray[Any, Any]], device: torch.device) -> None:
        from sentence_transformers import SentenceTransformer

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._model = SentenceTransformer(str(checkpoint), device=str(device), model_kwargs={"dtype": dtype}).eval()
        texts = [torch.from_numpy(text.astype(np.int64)).to(device) for text in sorted(ids, key=len, reverse=True)]
        self._batches = [self._batch(texts[first : first + 32]) for first in range(0, len(texts), 32)]
        self.seconds()

    @staticmethod
    def _batch(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        return {"input_ids": pad_sequence(texts, batch_first=True, padding_value=1), "attention_mask": mask}

    def seconds(self) -> float:
        began_s = time.perf_counter()
        with torch.inference_mode():
            for batch in self._batches:
                self._model(dict(batch))["sentence_embedding"].cpu()
        return time.perf_counter() - began_s


def http_rates(options: argparse.Namespace, engine_rate: float) -> dict[str, float]:
    """What clients of a node get, `TEXTS_PER_REQUEST` in a request, and one client with all texts in one request."""
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder, running_neuron() as (neuron, _):
        write_encoder(shape, Path(folder) / "bge-m3")
        neuron.load("bge-m3", f"{folder}/bge-m3")
        texts = texts_of(options.texts, options.tokens, shape["vocab_size"])
        parts = [texts[first : first + TEXTS_PER_REQUEST] for first in range(0, len(texts), TEXTS_PER_REQUEST)]
        send(neuron, parts[0])
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(lambda part: send(neuron, part), parts))
            began_s = time.perf_counter()
            total = sum(pool.map(lambda part: send(neuron, part), parts * HTTP_ROUNDS))
            rate = total / (time.perf_counter() - began_s)
        one_s = float("inf")
        for _ in range(options.repeats):
            began_s = time.perf_counter()
            send(neuron, texts)
            one_s = min(one_s, time.perf_counter() - began_s)
    one_rate = options.texts * options.tokens / one_s
    return {
        "http_tokens_per_s": rate,
        "http_share_of_engine": rate / engine_rate,
        "one_request_tokens_per_s": one_rate,
        "one_request_share_of_engine": one_rate / engine_rate,
    }


def send(neuron: Neuron, texts: list[str]) -> int:
    body = {"model": "bge-m3", "input": texts, "encoding_format": "base64"}
    return int(neuron.call("/v1/embeddings", body)["usage"]["prompt_tokens"])


if __name__ == "__main__":
    main()
