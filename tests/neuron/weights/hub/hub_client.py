"""A model on a fake hub, and a client that resolves it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.weights.hub import resolve

StartHub = Callable[..., Any]

COMMIT = "c0ffee" + "0" * 34
WEIGHTS = (
    struct.pack("<Q", 66)
    + b'{"w":{"dtype":"U8","shape":[1000000],"data_offsets":[0,1000000]}} '
    + os.urandom(1_000_000)
)
MODEL = {
    "README.md": b"# a model",
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"other",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


class Client:
    """Resolves against a fake hub and records the reported progress."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.reports: list[tuple[int, int]] = []

    def resolve(self, hub: Any, source: str = "org/model", **options: Any) -> Path:
        arguments: dict[str, Any] = {
            "cache_dir": self.cache,
            "endpoint": hub.endpoint if hub else "http://127.0.0.1:9",
            "cancelled": lambda: False,
            "environment": {"HF_HOME": str(self.cache)},
        }
        return resolve(source, progress=lambda *report: self.reports.append(report), **(arguments | options))

    def partials(self) -> list[Path]:
        return list(self.cache.rglob("*.incomplete"))


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "cache")
