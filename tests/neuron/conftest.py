"""What every test of a node may rely on: one thread that computes, the same random values, and a hub on localhost."""

import gc

import pytest
import torch

from .fake_hub import start_hub

__all__ = ["start_hub"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random tensors are the same in every run, whichever tests the process has run before; so are those of fixtures
    that several tests share. One thread computes: the suite runs a process per core, and OpenMP would wait for ever
    for the threads of the process that this one was forked from. An engine thread that an earlier test ran in this
    process has set another number."""
    torch.default_generator.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """An engine that closes collects garbage, and would visit all that tests of other files have left."""
    gc.collect()
    gc.freeze()
