"""Kernels run on a GPU, or on the CPU under Triton's interpreter (`TRITON_INTERPRET=1`, as `make test` does)."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cortex.neuron.kernels.jit import INTERPRETED

if INTERPRETED:  # no kernel of Triton is in them, and the rest of the suite runs them
    collect_ignore = [
        "native",
        "attention/test_cpu.py",
        "cpu",
        "delta/test_reference.py",
        "dense/test_blocks.py",
        "quantised/test_quantise.py",
        "quantised/test_recipes.py",
        "quantised/test_tiles.py",
        "quantised/test_unpack.py",
        "test_gumbel.py",
        "test_shared_memory.py",
    ]
    from .fast_interpreter import speed_up

    speed_up()


if torch.cuda.is_available():  # those of the CPU are, as in every test of a node

    @pytest.fixture(autouse=True)
    def _same_random_values() -> None:
        torch.cuda.manual_seed(0)


def combinations(*factors: Sequence[Any], one_of: int) -> list[tuple[Any, ...]]:
    """Every combination of the factors' values; interpreted, when each takes long, one of so many, in which each value
    of a factor meets values of all others."""
    return [
        tuple(factor[index] for factor, index in zip(factors, indices, strict=True))
        for indices in itertools.product(*(range(len(factor)) for factor in factors))
        if not INTERPRETED or sum(indices) % one_of == 0
    ]


AssertClose = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if INTERPRETED:
        return torch.device("cpu")
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")


@pytest.fixture
def on_hopper() -> None:
    """Not a condition of a mark: those are evaluated before the processes of the tests are forked, which the context of
    a device does not survive."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a card of Hopper's kind")


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖; NaN counts as infinite."""
    error = ((out.double() - reference.double()).norm() / reference.double().norm()).item()
    return error if error == error else float("inf")


@pytest.fixture
def assert_close(dtype: torch.dtype) -> AssertClose:
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5

    def check(out: torch.Tensor, reference: torch.Tensor) -> None:
        assert out.shape == reference.shape
        assert relative_error(out, reference) < limit

    return check
