import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from cortex.neuron.worker.factory import WorkerFactory

FAULTY = str(Path(__file__).parent.parent / "faulty")
if FAULTY not in sys.path:
    sys.path.append(FAULTY)  # workers import from where the daemon does


class LastingFactory(WorkerFactory):
    """Its fork server stays for further nodes: the import of the engine takes longer than most tests. A node that
    closes ends its workers itself."""

    async def close(self) -> None:
        pass

    async def end(self) -> None:
        await super().close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workers() -> AsyncIterator[WorkerFactory]:
    """Workers with the real engine, for tests whose loop is that of the session."""
    factory = LastingFactory()
    yield factory
    await factory.end()
