"""Which tensors of a checkpoint stay quantised on a GPU. Imports no torch: preflight asks it as well as the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cortex.neuron.kernels.quantised.layout import GGML_LAYOUTS, PUBLISHED_LAYOUTS, SCALED_COLUMNS, Layout
from cortex.neuron.kernels.quantised.recipes import Recipe
from cortex.neuron.weights.safetensors.arranged import expert_infos
from cortex.neuron.weights.stored import TensorInfo

QUANTISABLE: Final = frozenset({"F32", "F16", "BF16"})
"""Formats that a recipe applies to."""
STORED_LAYOUTS: Final = {**GGML_LAYOUTS, **PUBLISHED_LAYOUTS}


def packed_layouts(tensors: Mapping[str, TensorInfo], recipe: Recipe | None) -> dict[str, Layout]:
    """By tensor: the matrices that are stored quantised, and with a recipe the dense ones, which it quantises.

    The experts of a stack are matrices of their own.
    """
    layouts: dict[str, Layout] = {}
    matrices = dict(tensors)
    for name, info in tensors.items():
        matrices |= expert_infos(name, info)
    for name, info in matrices.items():
        if len(info.shape) != 2:
            continue
        if info.dtype in STORED_LAYOUTS and info.shape[1] % SCALED_COLUMNS == 0:
            layouts[name] = STORED_LAYOUTS[info.dtype]
        elif recipe is not None and info.dtype in QUANTISABLE and info.shape[1] % SCALED_COLUMNS == 0:
            layouts[name] = recipe.layout_of(name)
    return layouts
