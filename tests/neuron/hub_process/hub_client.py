"""A model on a fake hub, and a client that resolves it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import file_download
from huggingface_hub.utils import _http as client_http

from cortex.ipc import pool
from cortex.ipc.helper import Helper
from cortex.ipc.helper_process import Calls
from cortex.neuron.hub_process import service
from cortex.neuron.hub_process.resolver import resolve

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


class ThreadProcess:
    """The hub process as a thread of this one, which is started in no time."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        helper = Helper(name="hub", purpose="", module="")
        with contextlib.suppress(OSError):
            Calls(helper, service.functions()).serve(self._control)

    def kill(self) -> None:
        self._control.close()

    def wait(self) -> int:
        return 0


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Except in tests that use `real_process`."""
    if "real_process" in request.fixturenames:
        return

    def start(*_: str, environment: Mapping[str, str]) -> tuple[ThreadProcess, socket.socket]:
        ours, theirs = socket.socketpair()
        return ThreadProcess(theirs), ours

    monkeypatch.setattr(pool, "start_child_of_thread", start)


@pytest.fixture
def real_process() -> None:
    """The test needs the process itself: its environment, or its end."""


class Sleeps(list[float]):
    """Stands for the module `time`: sleeps are recorded and take no time."""

    def sleep(self, seconds: float) -> None:
        self.append(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Sleeps:
    recorded = Sleeps()
    for module in (service, file_download, client_http):
        monkeypatch.setattr(module, "time", recorded)
    return recorded


class Client:
    """Resolves against a fake hub and records the reported progress."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.reports: list[tuple[int, int]] = []

    def resolve(self, hub: Any, source: str = "org/model", **options: Any) -> Path:
        environment = {
            "HF_HOME": str(self.cache),
            "HF_ENDPOINT": hub.endpoint if hub else "http://127.0.0.1:9",
            **options.pop("environment", {}),
        }
        arguments: dict[str, Any] = {"cache_dir": self.cache, "cancelled": lambda: False, "environment": environment}
        return resolve(source, progress=lambda *report: self.reports.append(report), **(arguments | options))

    def partials(self) -> list[Path]:
        return list(self.cache.rglob("*.incomplete"))


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "cache")
