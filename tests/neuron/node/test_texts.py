"""Texts of many models, each with something behind it that can be given back."""

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
        self.told: list[str] = []
        self.error: Exception | None = None

    async def read(self):
        self.told.append("read")
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(path=self.path)

    async def wake(self) -> None:
        self.told.append("wake")

    async def rest(self) -> None:
        self.told.append("rest")

    async def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def opened() -> list[Source]:
    return []


@pytest.fixture
def texts(opened: list[Source]) -> Texts:
    def open_text(path: Path) -> Source:
        opened.append(Source(path))
        return opened[-1]

    return Texts(open_text)


async def test_a_text_is_read_once_for_all_who_ask(texts, opened):
    one, two, _ = await asyncio.gather(texts.get("m", HERE), texts.get("m", HERE), texts.awake("m", HERE))
    assert one is two
    assert [source.told for source in opened] == [["read", "wake"]]


async def test_another_path_is_another_text_and_the_first_is_let_go(texts, opened):
    await texts.get("m", HERE)
    first, second = await asyncio.gather(texts.get("m", THERE), texts.get("m", THERE))
    assert first is second
    assert first.path == THERE
    assert [source.told for source in opened] == [["read", "close"], ["read"]]


@pytest.mark.parametrize(
    ("error", "expected"), [(TextFileMalformed("broken"), LoadFailed), (Recovering("again"), Recovering)]
)
async def test_one_that_cannot_be_read_is_tried_again_by_the_next_who_asks(texts, opened, error, expected):
    asking = asyncio.create_task(texts.get("m", HERE))
    await asyncio.sleep(0)
    opened[0].error = error
    with pytest.raises(expected):
        await asking
    assert "close" in opened[0].told
    await texts.get("m", HERE)
    assert len(opened) == 2


async def test_an_error_that_nobody_waited_for_is_not_kept_for_the_next_who_asks(texts, opened):
    asking = asyncio.create_task(texts.get("m", HERE))
    await asyncio.sleep(0)
    opened[0].error = TextFileMalformed("broken")
    asking.cancel()
    await asyncio.sleep(0.01)
    await texts.get("m", HERE)
    assert [source.told for source in opened] == [["read", "close"], ["read"]]


async def test_who_leaves_early_does_not_stop_the_reading(texts, opened):
    asking = asyncio.create_task(texts.get("m", HERE))
    await asyncio.sleep(0)
    asking.cancel()
    await texts.get("m", HERE)
    assert opened[0].told == ["read"]


async def test_those_rest_whose_models_are_not_in_memory_and_that_nobody_uses(texts, opened):
    for name in ("loaded", "counted", "forgotten"):
        await texts.get(name, HERE)
    for source, idle_s in zip(opened, (1e6, 1.0, 1e6), strict=True):
        source.idle_s = idle_s
    await texts.rest_idle(lambda model_id: model_id == "loaded")
    assert [source.told[1:] for source in opened] == [[], [], ["rest"]]
    await texts.rest("unknown")
    await texts.close()
    assert all(source.told[-1] == "close" for source in opened)
