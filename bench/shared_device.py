"""Measures how long tokens of a chat model wait for an embedding model on the same device.

    PYTHONPATH=src python bench/shared_device.py --chat-shape qwen3-8b
    PYTHONPATH=src python bench/shared_device.py --chat-shape tiny --shape tiny --texts 32 --tokens 128   # on a CPU

A node has both models. A stream of the chat model is read twice: alone, and while `--texts` texts are embedded in one
request, again and again. Printed are the longest and the median time between two tokens as a client sees them, and by
how much the longest grew, which is to be below 20 ms on a GPU.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from daemon import Neuron, running_neuron
from encoder_checkpoint import BGE_M3, TINY, texts_of, write_encoder
from random_checkpoint import write_checkpoint
from shapes import SHAPES

ENCODERS = {"bge-m3": BGE_M3, "tiny": TINY}
BOUND_MS = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat-shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--shape", choices=ENCODERS, default="bge-m3")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = ENCODERS[options.shape]
    with tempfile.TemporaryDirectory() as folder, running_neuron() as (neuron, _):
        write_checkpoint(SHAPES[options.chat_shape], Path(folder) / "chat")
        write_encoder(shape, Path(folder) / "embedder")
        neuron.load("chat", f"{folder}/chat")
        neuron.load("embedder", f"{folder}/embedder")
        texts = texts_of(options.texts, options.tokens, shape["vocab_size"])
        embed(neuron, texts[:8])
        gaps_ms(neuron, 32)
        alone = gaps_ms(neuron, options.new_tokens)
        done = threading.Event()
        client = threading.Thread(target=lambda: embed_until(done, neuron, texts))
        client.start()
        together = gaps_ms(neuron, options.new_tokens)
        done.set()
        client.join()
    result = {
        "alone_median_ms": median(alone),
        "alone_longest_ms": max(alone),
        "together_median_ms": median(together),
        "together_longest_ms": max(together),
        "added_ms": max(together) - max(alone),
        "share_of_bound": (max(together) - max(alone)) / BOUND_MS,
    }
    for name, value in result.items():
        print(f"{name:24} {value:,.4g}")
    if options.json:
        options.json.write_text(json.dumps(result))


def embed(neuron: Neuron, texts: list[str]) -> None:
    neuron.call("/v1/embeddings", {"model": "embedder", "input": texts, "encoding_format": "base64"})


def embed_until(done: threading.Event, neuron: Neuron, texts: list[str]) -> None:
    while not done.is_set():
        embed(neuron, texts)


def gaps_ms(neuron: Neuron, num_tokens: int) -> list[float]:
    """The times between the tokens of one stream."""
    address = urlsplit(neuron.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=600)
    body = {"model": "chat", "prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    times_s = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            times_s.append(time.perf_counter())
    connection.close()
    gaps = [(after - before) * 1e3 for before, after in pairwise(times_s)]
    assert len(gaps) > num_tokens // 2, f"the stream had {len(times_s)} events"
    return gaps


if __name__ == "__main__":
    main()
