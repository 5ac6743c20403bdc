"""Arrays that are copied to the device together arrive as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cortex.neuron.engine.uploads import packed, upload

ARRAYS: list[NDArray[Any]] = [
    np.arange(7, dtype=np.int64) - 3,
    np.zeros(0, dtype=np.int64),
    np.arange(5, dtype=np.int32),
    np.arange(24, dtype=np.int64).reshape(4, 6)[:, ::2],
    np.array([[True], [False], [True]]),
    np.zeros((0, 2), dtype=np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4).T,
]


def check(tensors: list[torch.Tensor], arrays: list[NDArray[Any]]) -> None:
    for tensor, array in zip(tensors, arrays, strict=True):
        expected = torch.from_numpy(np.ascontiguousarray(array))
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.cpu(), expected)
        assert tensor.is_contiguous()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("count", [1, len(ARRAYS)])
def test_uploaded_arrays_keep_their_contents(device: str, count: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    check(upload(torch.device(device), *ARRAYS[:count]), ARRAYS[:count])


def test_packed_arrays_are_found_again_at_aligned_places() -> None:
    memory, views = packed(ARRAYS, lambda size: torch.empty(size, dtype=torch.uint8))
    tensors = views(memory)
    check(tensors, ARRAYS)
    assert all((tensor.data_ptr() - memory.data_ptr()) % 16 == 0 for tensor in tensors if tensor.numel())
