"""What a load that quantises allocates in addition to the quantised matrix does not grow with the matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cortex.neuron.kernels.float8.layout import FLOAT8_ROWS
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.quantised import codes
from cortex.neuron.kernels.quantised.layout import Q4, Q6, Q8
from cortex.neuron.kernels.storages import empty_device_matrix
from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.transfer import PackedPlacement, PieceSizes, load_into

Directory = Callable[..., Path]
LAYOUTS = [Q4, Q6, Q8, FLOAT8_ROWS]


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest memory that an operation allocated."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return result


def load_quantised(
    directory: Path, layout: DeviceLayout, device: torch.device, sizes: PieceSizes, measured: Callable[[], Any]
) -> None:
    """`measured`: a context for the load alone."""
    checkpoint = open_checkpoint(directory)
    rows, columns = checkpoint.tensors["matrix"].shape
    matrix = empty_device_matrix(layout, rows, columns, device)
    with measured():
        load_into(
            checkpoint,
            (),
            [PackedPlacement("matrix", matrix, 0, rows)],
            progress=lambda *_: None,
            cancelled=lambda: False,
            sizes=sizes,
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_tensor_is_of_one_piece(
    model_directory: Directory, monkeypatch: pytest.MonkeyPatch, layout: DeviceLayout
) -> None:
    piece_weights = 64 * 256
    monkeypatch.setattr(codes, "has_kernels", lambda _: False)  # the interpreter of kernels has its own memory
    largest = LargestTensor()  # type: ignore[no-untyped-call]
    directory = model_directory({"matrix": torch.randn(16 * 64, 256).bfloat16()})
    load_quantised(directory, layout, torch.device("cpu"), PieceSizes(cached_weights=piece_weights), lambda: largest)
    assert 0 < largest.num_bytes <= 4 * piece_weights  # float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_device_memory_beside_the_matrix_is_that_of_a_few_pieces(
    model_directory: Directory, layout: DeviceLayout
) -> None:
    directory = model_directory({"matrix": torch.ones(16384, 8192, dtype=torch.bfloat16)})
    before, sizes = 0, PieceSizes()

    class Measured:
        def __enter__(self) -> None:
            nonlocal before
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()

        def __exit__(self, *_: object) -> None:
            assert torch.cuda.max_memory_allocated() - before <= 8 * sizes.num_bytes

    load_quantised(directory, layout, torch.device("cuda"), sizes, Measured)
