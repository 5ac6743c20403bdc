"""Which tensors of a checkpoint are quantised in memory. Imports no torch: preflight asks it as well as the engine."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

from cortex.neuron.kernels.float8.layout import FLOAT8_ROWS, float8_layout
from cortex.neuron.kernels.quantised.layout import GGML_LAYOUTS, PUBLISHED_LAYOUTS, Q8, SCALED_COLUMNS, Layout
from cortex.neuron.kernels.quantised.recipes import DeviceLayout, Recipe
from cortex.neuron.weights.safetensors.arranged import expert_infos
from cortex.neuron.weights.stored import TensorInfo

QUANTISABLE: Final = frozenset({"F32", "F16", "BF16"})
"""Formats that a recipe applies to."""
STORED_LAYOUTS: Final = {**GGML_LAYOUTS, **PUBLISHED_LAYOUTS}


def packed_layouts(tensors: Mapping[str, TensorInfo], recipe: Recipe | None) -> dict[str, DeviceLayout]:
    """By tensor: the matrices that are stored quantised, and with a recipe the dense ones, which it quantises.

    The experts of a stack are matrices of their own.
    """
    layouts: dict[str, DeviceLayout] = {}
    matrices = dict(tensors)
    for name, info in tensors.items():
        matrices |= expert_infos(name, info)
    for name, info in matrices.items():
        if len(info.shape) != 2:
            continue
        if info.dtype in STORED_LAYOUTS and info.shape[1] % SCALED_COLUMNS == 0:
            float8 = float8_layout(info.shape, info.scaled) if info.dtype == "FP8" else None
            layouts[name] = float8 or STORED_LAYOUTS[info.dtype]
        elif recipe is not None and info.dtype in QUANTISABLE and info.shape[1] % SCALED_COLUMNS == 0:
            layout = recipe.layout_of(name)
            is_possible = layout != FLOAT8_ROWS or float8_layout(info.shape, (1, info.shape[1])) is not None
            layouts[name] = layout if is_possible else Q8
    return layouts


def suits_cpus(recipe: Recipe) -> bool:
    """Whether a CPU has products for it."""
    return isinstance(recipe.matrices, Layout)


def chosen_codes(layouts: Mapping[str, DeviceLayout], formats: Container[str]) -> dict[str, Layout]:
    """Of `packed_layouts`, those of tensors that a recipe quantises with scales of groups, as a CPU has them.
    `formats`: has the names of tensors that are stored quantised."""
    return {name: layout for name, layout in layouts.items() if name not in formats and isinstance(layout, Layout)}
