"""What every test of the engine may rely on: the thread it runs on is the only one that computes."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The suite runs a process per core, and more threads do not help models as tiny as these."""
    torch.set_num_threads(1)
