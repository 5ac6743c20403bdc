"""Text models of a node, with fake sources that record the calls."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from cortex.neuron.node.texts import Texts
from cortex.neuron.text.errors import TextFileMalformed
from cortex.wire.errors import LoadFailed, Recovering

HERE, THERE = Path("here"), Path("there")


class Source:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.idle_s = 0.0
        self.calls: list[str] = []
        self.error: Exception | None = None

    async def read(self):
        self.calls.append("read")
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(path=self.path)

    async def wake(self) -> None:
        self.calls.append("wake")

    async def rest(self) -> None:
        self.calls.append("rest")

    async def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def opened() -> list[Source]:
    return []


@pytest.fixture
def texts(opened: list[Source]) -> Texts:
    def open_text(path: Path) -> Source:
        opened.append(Source(path))
        return opened[-1]

    return Texts(open_text)


async def test_reads_a_text_once_for_concurrent_callers(texts, opened):
    one, two, _ = await asyncio.gather(texts.get("m", HERE), texts.get("m", HERE), texts.awake("m", HERE))
    assert one is two
    assert [source.calls for source in opened] == [["read", "wake"]]


async def test_another_path_replaces_the_text_and_closes_the_first(texts, opened):
    await texts.get("m", HERE)
    first, second = await asyncio.gather(texts.get("m", THERE), texts.get("m", THERE))
    assert first is second
    assert first.path == THERE
    assert [source.calls for source in opened] == [["read", "close"], ["read"]]


@pytest.mark.parametrize(
    ("error", "expected"), [(TextFileMalformed("broken"), LoadFailed), (Recovering("again"), Recovering)]
)
async def test_reads_again_after_a_failed_read(texts, opened, error, expected):
    caller = asyncio.create_task(texts.get("m", HERE))
    await asyncio.sleep(0)
    opened[0].error = error
    with pytest.raises(expected):
        await caller
    assert "close" in opened[0].calls
    await texts.get("m", HERE)
    assert len(opened) == 2


async def test_reads_again_after_an_error_that_no_caller_saw(texts, opened):
    caller = asyncio.create_task(texts.get("m", HERE))
    await asyncio.sleep(0)
    opened[0].error = TextFileMalformed("broken")
    caller.cancel()
    await asyncio.sleep(0.01)
    await texts.get("m", HERE)
    assert [source.calls for source in opened] == [["read", "close"], ["read"]]


async def test_cancelled_caller_does_not_stop_the_read(texts, opened):
    caller = asyncio.create_task(texts.get("m", HERE))
    await asyncio.sleep(0)
    caller.cancel()
    await texts.get("m", HERE)
    assert opened[0].calls == ["read"]


async def test_rests_idle_texts_of_models_that_are_not_in_memory(texts, opened):
    for name in ("loaded", "counted", "forgotten"):
        await texts.get(name, HERE)
    for source, idle_s in zip(opened, (1e6, 1.0, 1e6), strict=True):
        source.idle_s = idle_s
    await texts.rest_idle(lambda model_id: model_id == "loaded")
    assert [source.calls[1:] for source in opened] == [[], [], ["rest"]]
    await texts.rest("unknown")
    await texts.close()
    assert all(source.calls[-1] == "close" for source in opened)
