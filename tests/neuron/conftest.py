"""What every test of a node may rely on: one thread that computes, and a hub on localhost."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests are not packages; this lets them share the fake hub

from .fake_hub import start_hub

__all__ = ["start_hub"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The suite runs a process per core, and more threads do not help models as tiny as these."""
    torch.set_num_threads(1)
