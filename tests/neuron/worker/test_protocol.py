"""Messages between the daemon and its workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortex.ipc.channel import Unsendable
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.worker.protocol import Submit


def test_request_arrives_with_its_prompt() -> None:
    request = EngineRequest("r", (0, 7, 2**32 - 1), 4, SamplingParams())
    received = Submit.of(3, request).whole()
    assert replace(received, prompt=tuple(received.prompt)) == request


@pytest.mark.parametrize("token", [-1, 2**32])
def test_prompt_with_an_impossible_token_fails_alone(token: int) -> None:
    with pytest.raises(Unsendable, match="token id"):
        Submit.of(3, EngineRequest("r", (1, token), 4, SamplingParams()))
