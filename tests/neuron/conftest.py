"""What every test of a node may rely on: one thread that computes, and a hub on localhost."""

import pytest
import torch

from .fake_hub import start_hub

__all__ = ["start_hub"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The suite runs a process per core, and more threads do not help models as tiny as these."""
    torch.set_num_threads(1)
