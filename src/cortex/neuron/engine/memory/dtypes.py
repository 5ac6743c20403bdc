"""In which numbers a model is computed. Imports no torch: the node reckons with it before there is an engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BFLOAT16_PRODUCTS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FOUR_BIT_PRODUCTS = frozenset({"avx2", "avx512f"})


def number_format(wanted: str, device_kind: str) -> str:
    """The name of the dtype a model is computed in; `auto` takes what the device is fast at."""
    if wanted != "auto":
        return wanted
    if device_kind == "cuda" or _processor_features() & _BFLOAT16_PRODUCTS:
        return "bfloat16"
    return "float32"  # without bfloat16 dot products the faster of the two


def has_four_bit_products() -> bool:
    """Whether the processor has what vectorised products in four bits need. The engine measures what they are worth;
    this is what can be said before."""
    return bool(_processor_features() & _FOUR_BIT_PRODUCTS)


@cache
def _processor_features() -> frozenset[str]:
    return frozenset(Path("/proc/cpuinfo").read_text().split())
