"""Model directories small enough for a test and real enough for a preflight, and a node that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from lasting_workers import lasting_workers

from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.dependencies import NodeDependencies
from cortex.neuron.node.inspection_process.preflight import ModelMetadata
from cortex.neuron.node.inspection_process.reading import Read, find_local, read_metadata_of
from cortex.neuron.node.node import Node
from cortex.neuron.text.model import TextInspection, TextModel
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.protocol import Capabilities

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
}


def write_model(folder: Path, *, config: dict[str, Any] | None = None, **behaviour: Any) -> Path:
    """A directory that passes the preflight; how its load goes is up to `behaviour` (see `faulty_engine`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (folder / "faulty.json").write_text(json.dumps(behaviour))
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64))
    return folder


def models(tmp_path: Path, **behaviours: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one model directory per name."""
    return {
        "models": [
            {"id": name, "source": str(write_model(tmp_path / name, **behaviour))}
            for name, behaviour in behaviours.items()
        ]
    }


class PlainText:
    """A text without a tokenizer, nor a process."""

    idle_s = 0.0
    num_tokenised = 0

    def __init__(self, path: Path, chat_template: str | None = None) -> None:
        self.path = path
        self.chat_template = chat_template

    async def read(self) -> TextModel:
        return cast(TextModel, SimpleNamespace())  # a node uses nothing of it

    async def wake(self) -> None:
        pass

    async def rest(self) -> None:
        pass

    async def close(self) -> None:
        pass


def inspect_text(path: Path) -> TextInspection:
    return TextInspection(Capabilities(tools=True, notes=("from the template",)), SamplingDefaults(top_k=40))


@dataclass(frozen=True, slots=True)
class LocalInspector:
    """Reads the files of models on threads of this process."""

    find: Callable[[str, str, str | None], str | None] = find_local

    async def find_local(self, source: str, cache: Path, quant: str | None) -> Path | None:
        path = await asyncio.to_thread(self.find, source, str(cache), quant)
        return None if path is None else Path(path)

    async def read(self, job: Read) -> ModelMetadata:
        return await asyncio.to_thread(read_metadata_of, job)

    async def read_text(self, path: Path, name: str, chat_template: str | None = None) -> TextInspection:
        return inspect_text(path)

    async def rest_idle(self) -> None:
        pass

    async def close(self) -> None:
        pass


def parts(**changes: Any) -> NodeDependencies:
    """The real node but for the engine, the inspection process and the tokenizer, and impatient."""
    find = changes.pop("find_local", find_local)
    return NodeDependencies(
        **{
            "make_workers": partial(lasting_workers, "faulty_engine:load"),
            "open_text": PlainText,
            "inspector": partial(LocalInspector, find),
            "policy": BackoffPolicy(first_delay_s=0.05, max_streak=3),
            "first_retry_s": 0.1,
            **changes,
        }
    )


@contextlib.asynccontextmanager
async def running_node(tmp_path: Path, config: dict[str, Any] | None = None, **changes: Any) -> AsyncIterator[Node]:
    settings = {"harness": {"torch": {"hf_cache": str(tmp_path / "hub")}}, "drain_s": 2.0, **(config or {})}
    neuron_config = msgspec.convert(settings, NeuronConfig, dec_hook=lambda kind, text: kind(text))
    node = await Node.start(neuron_config, parts(**changes))
    try:
        yield node
    finally:
        await node.close()
