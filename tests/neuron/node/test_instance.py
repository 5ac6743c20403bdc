import time

import pytest

from cortex.neuron.config import Limits
from cortex.neuron.engine.request import EngineRequest, EngineStats, FinishReason, SamplingParams, StepOutput
from cortex.neuron.node.instance import Instance, ModelCallbacks
from cortex.wire.errors import CortexError, GenerationFailed

from ..worker.hosts.fake_host import FakeHost


def instance_of(host: FakeHost, lost: list[str]) -> Instance:
    callbacks = ModelCallbacks(lambda *_: None, lambda: None, lambda _: None, lost.append, lambda: None)
    return Instance("m", host, Limits(), callbacks)


async def test_takes_reports_of_the_engine_before_the_load_has_ended() -> None:
    instance = instance_of(FakeHost(0), [])
    instance.on_stats(EngineStats(steps=3))
    assert instance.stats.steps == 3


async def test_speed_leaves_out_the_prompt_and_the_first_token_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    host = FakeHost(0)
    instance = instance_of(host, [])
    await host.load(instance)
    instance.generate(EngineRequest("one", (1, 2, 3), 100, SamplingParams()))
    for number in range(41):
        now_s = 30.0 + number / 16
        instance.on_outputs((StepOutput("one", tokens=(7,), finish="length" if number == 40 else None),))
    assert instance.load().tokens_per_s == 16
    now_s += 2
    assert instance.load().tokens_per_s == 16


@pytest.mark.parametrize("finish", [None, "stop"])
async def test_request_whose_follower_raises_fails_alone(finish: FinishReason | None) -> None:
    host = FakeHost(0)
    instance = instance_of(host, [])
    await host.load(instance)
    raising, other = (instance.generate(EngineRequest(name, (1,), 9)) for name in ("raising", "other"))
    errors: list[CortexError] = []
    received: list[StepOutput] = []

    def broken(_outputs: object) -> None:
        raise KeyError("a bug")

    raising.follow(broken, errors.append)
    other.follow(received.extend, errors.append)
    instance.on_outputs((StepOutput("raising", (1,), finish=finish), StepOutput("other", (2,), finish="stop")))
    assert [output.tokens for output in received] == [(2,)]
    assert [type(error) for error in errors] == [GenerationFailed]
    await instance.drained()
    assert ("raising" in host.requests) == (finish is not None), "the engine still has a request that did not finish"
