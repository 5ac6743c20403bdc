"""Whether the engine's packages are installed. A node without them runs models through harnesses only."""

from __future__ import annotations

import importlib.util

_NEEDED = ("torch", "tokenizers", "jinja2", "numpy", "safetensors")
REMEDY = "run `pip install '.[neuron]'` in a checkout of cortex"


def missing_packages() -> tuple[str, ...]:
    """Those that the engine needs and this host does not have."""
    return tuple(name for name in _NEEDED if importlib.util.find_spec(name) is None)
