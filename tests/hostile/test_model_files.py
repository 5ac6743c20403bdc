"""Downloaded models that attack their node: a real daemon reports them as damaged, and serves all others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio

from ..e2e.daemon.conftest import write_model
from ..ports import free_port
from ..programs import PYTHONPATH
from ..waiting import WAIT_S, until_response
from .target import MEBIBYTE, Target

ENDLESS = ("{{ (7**99999999) % 7 }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
GROWTH_BYTES = 150 * MEBIBYTE
"""The daemon stays below it over all attacks together; each of them would take gigabytes."""


def with_template(folder: Path, template: str) -> None:
    write_model(folder, inner=128)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def with_giant(folder: Path, name: str, count: int) -> None:
    """A JSON file of `count` times 1.5 MB, which takes twenty times as much memory."""
    write_model(folder, inner=128)
    with (folder / name).open("w") as file:
        file.write('{"junk": [')
        for _ in range(count):
            file.write("[]," * 500_000)
        file.write("[]]}")


def with_parts(folder: Path, num_parts: int) -> None:
    """A split GGUF, of which every part says that it holds as many numbers as one file may hold."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    num_numbers = 3 << 20
    numbers = text("numbers") + struct.pack("<IIQ", 9, 4, num_numbers)
    for number in range(num_parts):
        path = folder / f"m-{number + 1:05}-of-{num_parts:05}.gguf"
        keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama")] if number == 0 else []
        keys += [
            text("split.count") + struct.pack("<IH", 2, num_parts),
            text("split.no") + struct.pack("<IH", 2, number),
        ]
        header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys) + 1) + b"".join(keys) + numbers
        path.write_bytes(header)
        os.truncate(path, len(header) + 4 * num_numbers)  # the numbers are a hole


def snapshot(hub: Path, name: str) -> Path:
    folder = hub / f"models--org--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    files = folder / "snapshots" / ("0" * 40)
    files.mkdir(parents=True)
    return files


@pytest_asyncio.fixture
async def attacked(tmp_path: Path, scaled: Callable[[int, int], int]) -> AsyncIterator[tuple[Target, list[str]]]:
    """The daemon over a hub cache of hostile models and a good one, and the names of the hostile ones."""
    hub, port = tmp_path / "hub", free_port()
    for number in range(scaled(1, len(ENDLESS))):
        with_template(snapshot(hub, f"endless{number}"), ENDLESS[number])
    with_template(snapshot(hub, "gigabytes"), '{{ "a"*2999999999 }}')
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json"):
        with_giant(snapshot(hub, f"giant-{name.partition('.')[0]}"), name, scaled(12, 200))
    with_parts(snapshot(hub, "parts"), scaled(4, 120))
    hostile = sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in hub.iterdir())
    write_model(snapshot(hub, "zz-good"), inner=128)  # inspected last
    config = tmp_path / "neuron.toml"
    config.write_text(
        f'listen = "127.0.0.1:{port}"\n[limits]\ninspection_cpu_s = 1\ninspection_memory_mb = 256\n'
        f'[harness.torch]\nhf_cache = "{hub}"\n'
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cortex.neuron", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
    try:
        yield Target(port, process.pid, log), hostile
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


async def listening(target: Target) -> None:
    async def responds() -> bool:
        with contextlib.suppress(OSError):
            await target.health_s()
            return True
        return False

    await until_response(responds)


async def models(target: Target) -> dict[str, Any]:
    answer = await target.send(b"GET /models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    return {model["id"]: model for model in (body if isinstance(body, list) else body["models"])}


async def load(target: Target, model_id: str) -> tuple[int, str]:
    body = json.dumps({"model_id": model_id}).encode()
    head = (
        "POST /models/load?wait=true HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer = await target.send(head.encode() + body)
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode()


async def test_hostile_models_are_damaged_and_the_node_serves_the_others(attacked: tuple[Target, list[str]]) -> None:
    target, hostile = attacked
    await listening(target)
    before_bytes = target.memory_bytes()
    known = await until_response(lambda: models(target), lambda found: found["org/zz-good"].get("family"))
    reasons = {model_id: known[model_id].get("reason") for model_id in hostile}
    assert all(reasons.values()), reasons
    status, message = await load(target, "org/endless0")
    assert status >= 400
    assert "org/endless0 is damaged" in message
    status, message = await load(target, "org/zz-good")
    assert status == 200, message
    assert target.memory_bytes() - before_bytes < GROWTH_BYTES
