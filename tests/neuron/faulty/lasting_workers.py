"""Fork servers that serve all tests of a process: the import of an engine takes longer than most tests.

A fork server belongs to a loop, so these tests share that of the session.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import pytest_asyncio

from cortex.neuron.worker.factory import ENGINE, WorkerFactory


class LastingFactory(WorkerFactory):
    """Its fork server stays for further nodes. A node that closes ends its workers itself."""

    async def close(self) -> None:
        pass

    async def end(self) -> None:
        await super().close()


_factories: dict[str, LastingFactory] = {}


def lasting_workers(engine: str = ENGINE) -> WorkerFactory:
    """Workers with this engine, for tests whose loop is that of the session."""
    return _factories.setdefault(engine, LastingFactory(engine))


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def end_lasting_workers() -> AsyncIterator[None]:
    yield
    while _factories:
        await _factories.popitem()[1].end()


def share_loop(items: Iterable[pytest.Item], folder: Path) -> None:
    """Runs the tests below `folder` on the loop of the session."""
    for item in items:
        if item.path.is_relative_to(folder) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
