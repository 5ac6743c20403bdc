"""A real engine with one slot: a request of a higher class takes it from one of a lower class, which goes on later."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from ...waiting import WAIT_S
from .conftest import WIDE

if TYPE_CHECKING:
    from .conftest import Daemon, StartDaemon

pytestmark = pytest.mark.e2e


def body(**fields: Any) -> dict[str, Any]:
    return {"model": WIDE, "prompt": "The capital", "temperature": 0, "ignore_eos": True, "seed": 1, **fields}


def text_of(daemon: Daemon, **fields: Any) -> str:
    status, reply = daemon.call("/v1/completions", body(**fields))
    assert status == 200, reply
    return str(reply["choices"][0]["text"])


def test_request_preempts_one_of_a_lower_class_which_then_ends_as_if_alone(
    start_daemon: StartDaemon, loads_wide: str
) -> None:
    node = start_daemon(loads_wide, "[limits]\nmax_num_seqs = 1")
    node.wait_ready(WIDE)
    alone = text_of(node, max_tokens=80)
    request = urllib.request.Request(
        f"{node.url}/v1/completions",
        json.dumps(body(max_tokens=80, stream=True, priority=1)).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        lines = [response.readline()]
        text_of(node, prompt="Another", max_tokens=2)
        model = node.model(WIDE)
        assert model["load"]["running"] + model["load"]["waiting"] >= 1, "the other one has ended before"
        lines += response.readlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == alone
    metrics = urllib.request.urlopen(f"{node.url}/metrics", timeout=WAIT_S).read().decode()
    (preemptions,) = [line for line in metrics.splitlines() if line.startswith("neuron_preemptions_total{")]
    assert float(preemptions.split()[-1]) >= 1
