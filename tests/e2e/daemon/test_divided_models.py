"""Models that are divided among two CPU devices, by width and by layers, over HTTP: the responses of one device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Daemon, StartDaemon

pytestmark = pytest.mark.e2e

TINY = "tiny"
DIVISIONS = ("tensor_parallel", "pipeline_parallel")
"""Each is also the name of the model that is divided so."""
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, tiny_model: Path) -> Daemon:
    divided = [f'[[models]]\nid = "{name}"\nsource = "{tiny_model}"\n{name} = 2' for name in DIVISIONS]
    daemon = start_daemon("drain_s = 1.0", "cpu_devices = 2", *divided, loads_demo=False)
    for model in (TINY, *DIVISIONS):
        status, body = daemon.call("/models/load", {"model_id": model})
        assert status in (200, 202), body
        daemon.wait_ready(model)
    return daemon


def text_of(daemon: Daemon, **body: Any) -> str:
    status, response = daemon.call("/v1/completions", {"max_tokens": 24, "temperature": 0, **body})
    assert status == 200, response
    return str(response["choices"][0]["text"])


def test_discovery_and_status_name_the_devices(daemon: Daemon) -> None:
    _, discovery = daemon.call("/discovery")
    assert [device["kind"] for device in discovery["devices"]] == ["cpu", "cpu"]
    assert discovery["max_devices_per_model"] == 2
    assert [daemon.model(name)["devices"] for name in DIVISIONS] == [[0, 1], [0, 1]]
    assert daemon.model("pipeline_parallel")["stage_layers"] == [1, 1]
    assert len(daemon.model(TINY)["devices"]) == 1


@pytest.mark.parametrize("divided", DIVISIONS)
@pytest.mark.parametrize("prompt", ["The capital of France is", "x" * 200])
def test_greedy_response_is_the_same_as_on_one_device(daemon: Daemon, divided: str, prompt: str) -> None:
    first = text_of(daemon, model=divided, prompt=prompt)
    assert first == text_of(daemon, model=TINY, prompt=prompt)
    assert first == text_of(daemon, model=divided, prompt=prompt)  # from the prefix cache


@pytest.mark.parametrize("divided", DIVISIONS)
def test_structured_output_follows_its_schema(daemon: Daemon, divided: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    text = text_of(daemon, model=divided, prompt="A colour:", max_tokens=200, response_format=form)
    assert json.loads(text)["colour"] in ("red", "blue")
