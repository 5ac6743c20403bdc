import asyncio

import pytest

from cortex.neuron.engine.request import StepOutput
from cortex.neuron.node.generation import Generation
from cortex.wire.errors import Recovering


async def test_reads_all_outputs_since_the_last_read_as_one_batch() -> None:
    generation = Generation("r", lambda: None)
    for token in (1, 2):
        generation.push(StepOutput("r", (token,)))
    assert [output.tokens for output in await anext(generation)] == [(1,), (2,)]
    reading = asyncio.create_task(anext(generation))
    await asyncio.sleep(0)
    generation.push(StepOutput("r", (3,), finish="stop"))
    assert (await reading)[0].finish == "stop"
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_raises_an_error_after_the_unread_outputs() -> None:
    generation = Generation("r", lambda: None)
    generation.push(StepOutput("r", (1,)))
    generation.fail(Recovering("gone"))
    generation.push(StepOutput("r", (2,)))
    assert len(await anext(generation)) == 1
    for _ in range(2):
        with pytest.raises(Recovering):
            await anext(generation)


async def test_cancel_after_the_end_does_nothing() -> None:
    cancelled = []
    generation = Generation("r", lambda: cancelled.append(1))
    generation.cancel()
    generation.push(StepOutput("r", finish="cancelled"))
    generation.cancel()
    assert cancelled == [1]
