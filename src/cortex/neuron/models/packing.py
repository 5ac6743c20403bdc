"""Chooses the layout of each matrix of a checkpoint on a device. Pure, and imports no torch: used by the engine at
load, and before by the node's forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cortex.neuron.kernels.cpu.layout import CpuLayout, cpu_layout
from cortex.neuron.kernels.float8.layout import FLOAT8_ROWS, float8_layout
from cortex.neuron.kernels.layouts import DeviceLayout, MatrixLayout
from cortex.neuron.kernels.quantised.layout import (
    GGML_LAYOUTS,
    PUBLISHED_LAYOUTS,
    Q4,
    Q8,
    SCALED_COLUMNS,
    Layout,
    OrderedLayout,
)
from cortex.neuron.kernels.quantised.recipes import Recipe
from cortex.neuron.weights.safetensors.arranged import expert_infos
from cortex.neuron.weights.stored import TensorInfo

_STAYS_DENSE: Final = (".kv_b_proj.weight", ".bias")
"""Latent attention multiplies by `kv_b_proj` along rows and along columns, so no device keeps it in groups of columns.
The biases of all experts have the form of a matrix."""
QUANTISABLE: Final = frozenset({"F32", "F16", "BF16"})
"""Formats that a recipe applies to."""
STORED_LAYOUTS: Final = {**GGML_LAYOUTS, **PUBLISHED_LAYOUTS}


@dataclass(frozen=True, slots=True)
class MatrixDevice:
    """The properties of a device that decide the layouts of matrices."""

    kind: str
    """`cuda` or `cpu`."""
    dtype: str
    """The name of the dtype that the model computes in."""
    multiplies_codes: bool = False
    """Whether a CPU keeps quantised matrices as codes, not dense."""

    def quantises(self, recipe: Recipe) -> bool:
        """Whether it has GEMMs for what the recipe makes of dense matrices."""
        if self.kind == "cuda":
            return self.dtype == "bfloat16"
        return self.multiplies_codes and isinstance(recipe.matrices, Layout)


def choose_layouts(
    device: MatrixDevice, tensors: Mapping[str, TensorInfo], recipe: Recipe | None
) -> dict[str, MatrixLayout]:
    """By tensor: those that are quantised in memory. The experts of a stack are matrices of their own."""
    matrices = dict(tensors)
    for name, info in tensors.items():
        matrices |= expert_infos(name, info)
    chosen = ((name, choose_layout(device, name, info, recipe)) for name, info in matrices.items())
    return {name: layout for name, layout in chosen if layout is not None}


DRAFT_OUTPUT: Final = "draft_output.weight"
"""A name for the output matrix as a prediction head has it, which is no tensor of a checkpoint."""


def with_draft_output(device: MatrixDevice, layouts: Mapping[str, MatrixLayout]) -> Mapping[str, MatrixLayout]:
    """For a model with a prediction head: on a GPU, the head has a copy of a dense output matrix in four bits. It reads
    the matrix once for each token that it proposes, and a near tie that falls otherwise is a rejected draft."""
    is_used = device.kind == "cuda" and device.dtype == "bfloat16"
    return {**layouts, DRAFT_OUTPUT: Q4} if is_used else layouts


def draft_output(layouts: Mapping[str, MatrixLayout], output: str, hidden: int) -> MatrixLayout | None:
    """The layout of that copy, if there is one. `output`: the tensor of the output matrix."""
    if output in layouts or DRAFT_OUTPUT not in layouts or hidden % SCALED_COLUMNS:
        return None
    return layouts[DRAFT_OUTPUT]


def choose_layout(device: MatrixDevice, name: str, info: TensorInfo, recipe: Recipe | None) -> MatrixLayout | None:
    """The layout of a matrix that is stored quantised, or dense and quantised by the recipe; None: it is dense."""
    if len(info.shape) != 2 or info.shape[1] % SCALED_COLUMNS or name.endswith(_STAYS_DENSE):
        return None
    made = recipe.layout_of(name) if recipe is not None and info.dtype in QUANTISABLE else None
    if device.kind == "cuda":
        return _device_layout(info, made) if device.dtype == "bfloat16" else None
    if not device.multiplies_codes or ".experts." in name:  # experts are one stack, for which CPUs have dense GEMMs
        return None
    if isinstance(made, Layout):
        return CpuLayout(made.bits, made.group, made.zero)
    return cpu_layout(info.dtype)


def _device_layout(info: TensorInfo, made: DeviceLayout | None) -> DeviceLayout | OrderedLayout | None:
    """On a GPU. `made`: what the recipe makes of it."""
    if info.dtype == "FP8":
        return float8_layout(info.shape, info.scaled) or STORED_LAYOUTS["FP8"]
    if made == FLOAT8_ROWS and float8_layout(info.shape, (1, info.shape[1])) is None:
        return Q8
    layout = made or STORED_LAYOUTS.get(info.dtype)
    return OrderedLayout(layout, info.order) if info.order is not None and isinstance(layout, Layout) else layout
