"""KV of a prompt that one node has computed, on another one that computes it meanwhile: real daemons."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cortex.wire.node.kv_blocks import SOURCE, source_header
from cortex.wire.node.neighbours import Neighbour

from ...waiting import WAIT_S
from .conftest import WIDE, Daemon, StartDaemon

pytestmark = pytest.mark.e2e

PROMPT = "".join(f"{number} bottles of beer on the wall. " for number in range(110))


def respond(node: Daemon, source: Daemon | None = None, **options: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were not computed."""
    body = {"model": WIDE, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}
    headers = {"content-type": "application/json"}
    if source is not None:
        headers[SOURCE] = source_header(Neighbour(name="one", url=source.url)).decode()
    request = urllib.request.Request(f"{node.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        found = json.load(response)
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prompt_that_another_node_has_computed_is_not_computed_again(
    start_daemon: StartDaemon, wide_model: Path, tmp_path: Path
) -> None:
    nodes = [
        start_daemon(
            f'limits = {{kv_host_mb = 64, kv_disk_mb = 64, kv_disk_dir = "{tmp_path / name}"}}',
            f'[[models]]\nid = "{WIDE}"\nsource = "{wide_model}"',
            dtype="float32",
        )
        for name in ("one", "two")
    ]
    one, two = nodes
    for node in nodes:
        status, loaded = node.call("/models/load?wait=true", {"model_id": WIDE})
        assert (status, loaded["state"]) == (200, "ready"), loaded
        respond(node, prompt="Its speed is known now. " * 20)
    expected, cached = respond(one)
    assert cached == 0
    assert one.call("/models/unload", {"model_id": WIDE})[0] == 200, "its blocks are on disk then"
    text, cached = respond(two, source=one)
    assert text == expected
    assert cached > len(PROMPT) // 4
