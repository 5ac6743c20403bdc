"""The values of `quant` for dense weights that are quantised at load. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cortex.formats.quant_names import at_load
from cortex.neuron.kernels.float8.layout import FLOAT8_ROWS
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.quantised.layout import Q4, Q5, Q6, Q8, Layout


@dataclass(frozen=True, slots=True)
class Recipe:
    """Layouts for a model's matrices."""

    name: str
    matrices: DeviceLayout
    ends: Layout
    """The layout of the embedding and the output head, where few bits cost the most quality."""

    def layout_of(self, tensor: str) -> DeviceLayout:
        """The layout of a tensor, by its name in the checkpoint."""
        if "embed_tokens" in tensor or tensor.startswith("lm_head"):
            return self.ends
        return self.matrices


RECIPES: Final = {
    recipe.name: recipe
    for recipe in (
        Recipe("q4_k", Q4, Q6),
        Recipe("q5_k", Q5, Q6),
        Recipe("q6_k", Q6, Q6),
        Recipe("q8_0", Q8, Q8),
        Recipe("fp8", FLOAT8_ROWS, Q8),
    )
}


def recipe_of(quant: str) -> Recipe | None:
    """The recipe that a spelling means (`q4`, `Q4_K_M`, `q6k`, `int8`, …); None when there is none."""
    name = at_load(quant)
    return None if name is None else RECIPES[name]
