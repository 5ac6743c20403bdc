"""The layouts of quantised matrices, by where they lie. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from cortex.neuron.kernels.cpu.layout import CpuLayout
from cortex.neuron.kernels.float8.layout import Float8Layout
from cortex.neuron.kernels.quantised.layout import PUBLISHED_LAYOUTS, Layout, OrderedLayout

DeviceLayout = Layout | Float8Layout
"""In the memory of a GPU."""
MatrixLayout = DeviceLayout | OrderedLayout | CpuLayout
"""Each says how many bytes a matrix takes (`num_bytes`) and how many rows are packed together (`row_block`)."""
StackLayout = DeviceLayout | OrderedLayout
"""The layout of one matrix that holds the rows of several experts."""
_OF_EACH_EXPERT: Final = "of each expert"


def stack_layout(experts: Iterable[Collection[MatrixLayout | None]]) -> StackLayout | None:
    """The layout of one matrix with the rows of all experts, from those of the tensors of each; None: they cannot be in
    one. An `OrderedLayout` is one where each expert has an order of its own, or none."""
    found = [set(layouts) for layouts in experts]
    codes = {each.codes if isinstance(each, OrderedLayout) else each for layouts in found for each in layouts}
    layout = codes.pop() if len(codes) == 1 else None
    if not isinstance(layout, DeviceLayout):
        return None
    if not any(isinstance(each, OrderedLayout) for layouts in found for each in layouts):
        return layout
    if isinstance(layout, Layout) and all(len(layouts) == 1 for layouts in found):
        return OrderedLayout(layout, _OF_EACH_EXPERT)
    return None


def hosted_layout(layout: StackLayout) -> DeviceLayout:
    """The layout of the experts of a layer, of which some are in host memory. The CPU takes the same inputs for all
    experts, so those with orders are rounded to eight bits."""
    return PUBLISHED_LAYOUTS["INT_ORDERED"] if isinstance(layout, OrderedLayout) else layout
