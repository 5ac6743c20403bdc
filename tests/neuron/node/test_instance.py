from __future__ import annotations

import time

import pytest

from cortex.neuron.config import Limits
from cortex.neuron.engine.request import EngineRequest, EngineStats, FinishReason, SamplingParams, StepOutput
from cortex.neuron.node.instance import Instance, ModelCallbacks, Throughput
from cortex.wire.errors import CortexError, GenerationFailed

from ..worker.hosts.fake_host import FakeHost


def stream(throughput: Throughput, first_s: float, num_tokens: int, step_s: float) -> float:
    """One request whose first token comes at `first_s`. Returns when its last one came."""
    for number in range(num_tokens):
        now_s = first_s + number * step_s
        throughput.sample(now_s, int(number > 0), is_generating=number < num_tokens - 1)
    return now_s


def test_speed_of_one_request_is_that_after_its_first_token() -> None:
    throughput = Throughput()
    last_s = stream(throughput, 40.0, 51, 0.0625)  # after a prompt of any length
    assert throughput.per_s(last_s) == 16
    assert throughput.per_s(last_s + 4) == 16, "it does not fade after the stream"
    assert throughput.per_s(last_s + 6) == 0


def test_time_between_requests_does_not_count() -> None:
    throughput = Throughput()
    last_s = stream(throughput, 0.0, 11, 0.1)
    last_s = stream(throughput, last_s + 3, 11, 0.1)
    assert throughput.per_s(last_s) == pytest.approx(10)


def test_speeds_of_requests_at_the_same_time_are_added() -> None:
    throughput = Throughput()
    throughput.sample(1.0, 0, is_generating=True)
    for number in range(1, 11):
        throughput.sample(1.0 + number / 10, 2, is_generating=number < 10)
    assert throughput.per_s(2.0) == pytest.approx(20)


def test_slow_steps_count_in_full() -> None:
    throughput = Throughput()
    assert throughput.per_s(stream(throughput, 0.0, 10, 2.0)) == 0.5


def test_speed_is_that_of_the_last_seconds() -> None:
    throughput = Throughput()
    for number in range(20):
        throughput.sample(number, 10 if number < 10 else 50, is_generating=True)
    assert throughput.per_s(19) == 50


def test_new_stream_after_a_pause_is_not_mixed_with_the_one_before() -> None:
    throughput = Throughput()
    stream(throughput, 0.0, 11, 0.1)
    assert throughput.per_s(stream(throughput, 60.0, 3, 1.0)) == 1


def test_outputs_of_a_model_that_streams_none_take_no_memory() -> None:
    throughput = Throughput()
    for number in range(1000):
        throughput.sample(number / 100, 0, is_generating=False)
    assert len(throughput._samples) == 1  # noqa: SLF001 - nothing else shows what is kept
    assert throughput.per_s(stream(throughput, 10.0, 11, 0.1)) == pytest.approx(10)


def instance_of(host: FakeHost, lost: list[str]) -> Instance:
    callbacks = ModelCallbacks(lambda *_: None, lambda: None, lambda _: None, lost.append, lambda: None)
    return Instance("m", host, Limits(), callbacks)


async def test_takes_reports_of_the_engine_before_the_load_has_ended() -> None:
    instance = instance_of(FakeHost(0), [])
    instance.on_stats(EngineStats(steps=3))
    assert instance.stats.steps == 3


async def test_time_of_the_load_is_no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    host = FakeHost(0)
    instance = instance_of(host, [])
    await host.load(instance)
    now_s = 600.0
    instance.loaded()
    now_s = 607.0
    assert instance.idle_s == 7.0


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
