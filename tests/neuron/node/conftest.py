import sys
from pathlib import Path

import pytest

FAULTY = str(Path(__file__).parent.parent / "faulty")
if FAULTY not in sys.path:
    sys.path.append(FAULTY)  # workers import from where the daemon does

from lasting_workers import end_lasting_workers, lasting_workers, share_loop  # noqa: E402

from cortex.neuron.worker.factory import WorkerFactory  # noqa: E402

__all__ = ["end_lasting_workers"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share_loop(items, Path(__file__).parent)


@pytest.fixture
def workers() -> WorkerFactory:
    """Workers with the real engine."""
    return lasting_workers()
