"""What tests ask of a node, and how they wait for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faulty_engine

from cortex.neuron.engine.memory.host import anonymous_bytes
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.node.generation import Generation
from cortex.neuron.node.node import Node
from cortex.wire.node.orders import LoadRequest
from cortex.wire.node.protocol import ModelStatus

from ..generations import Reader
from ..tiny_models import write_llama


def request(request_id: str = "r", token: int = faulty_engine.PLAIN, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(id=request_id, prompt=(token,), max_tokens=max_tokens)


async def tokens_of(generation: Generation | Reader) -> list[int]:
    reader = generation if isinstance(generation, Reader) else Reader(generation)
    return [token async for batch in reader for output in batch for token in output.tokens]


async def load(
    node: Node, model_id: str = "m", *, source: str | None = None, devices: tuple[int, ...] = ()
) -> ModelStatus:
    return await node.load(LoadRequest(model_id=model_id, source=source, devices=devices), wait=True)


def has_worker(node: Node) -> bool:
    """On its first device."""
    return node.devices.supervisors[0].process_id is not None


def worker_of(node: Node, device: int = 0) -> int:
    """The process of a device, which must exist."""
    process_id = node.devices.supervisors[device].process_id
    assert process_id is not None
    return process_id


@contextmanager
def held(process_id: int) -> Iterator[None]:
    """The process stands still within the block: what it computes does not end before the block does."""
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def worker_bytes(node: Node) -> int:
    return anonymous_bytes(worker_of(node))


def write_source(folder: Path, seed: int, **changes: Any) -> str:
    """A real model, small enough to be loaded in every test: the `source` of its configuration."""
    return str(write_llama(folder, seed, **{"vocab_size": 1000, "max_position_embeddings": 4096, **changes}))


def greedy_request(request_id: str, max_tokens: int = 8) -> EngineRequest:
    greedy = SamplingParams(temperature=0.0)
    return EngineRequest(id=request_id, prompt=tuple(range(5, 25)), max_tokens=max_tokens, sampling=greedy)


async def generate(node: Node, model_id: str, request_id: str = "r", max_tokens: int = 8) -> list[int]:
    return await tokens_of(node.generate(model_id, greedy_request(request_id, max_tokens)))


async def converse(node: Node, model_id: str, request_id: str) -> tuple[list[int], int]:
    """The tokens after a prompt of 200, and how many of the prompt were cached."""
    prompt = tuple(number * 11 % 250 + 1 for number in range(200))
    request = EngineRequest(request_id, prompt, max_tokens=4, sampling=SamplingParams(temperature=0.0))
    outputs = [output async for batch in Reader(node.generate(model_id, request)) for output in batch]
    return [token for output in outputs for token in output.tokens], sum(each.cached_tokens or 0 for each in outputs)
