"""The layouts of quantised matrices, by where they lie. Needs no torch."""

from __future__ import annotations

from cortex.neuron.kernels.cpu.layout import CpuLayout
from cortex.neuron.kernels.float8.layout import Float8Layout
from cortex.neuron.kernels.quantised.layout import Layout, OrderedLayout

DeviceLayout = Layout | Float8Layout
"""In the memory of a GPU."""
MatrixLayout = DeviceLayout | OrderedLayout | CpuLayout
"""Each says how many bytes a matrix takes (`num_bytes`) and how many rows are packed together (`row_block`)."""
