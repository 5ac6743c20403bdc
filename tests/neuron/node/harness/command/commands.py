"""Models that the fake server runs, and its processes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from cortex.neuron.node.harness.command import guard
from cortex.neuron.node.harness.command.process_memory import descendants

SERVER = str(Path(__file__).with_name("fake_server.py"))
START = (sys.executable, "-S", SERVER, "--port", "${PORT}")


def config(*arguments: str, model: dict[str, Any] | None = None, **entry: Any) -> dict[str, Any]:
    harness = {"name": "fake", "cmd": [*START, *arguments], "memory_mb": 16, **entry}
    return {"harnesses": [harness], "models": [{"id": "m", "harness": "fake", **(model or {})}]}


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def servers() -> list[int]:
    """The processes below this one that run the fake server."""
    commands = {process: Path(f"/proc/{process}/cmdline").read_text() for process in descendants(os.getpid())}
    return [process for process, command in commands.items() if SERVER in command and guard.__file__ not in command]
