"""The dtype that a model computes in. Imports no torch: the node uses it before there is an engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BFLOAT16_PRODUCTS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FOUR_BIT_PRODUCTS = frozenset({"avx2", "avx512f"})


def dtype_name(wanted: str, device_kind: str) -> str:
    """The name of the dtype that a model computes in; `auto` is the fastest on the device."""
    if wanted != "auto":
        return wanted
    if device_kind == "cuda" or _processor_features() & _BFLOAT16_PRODUCTS:
        return "bfloat16"
    return "float32"  # without bfloat16 dot products the faster of the two


def has_four_bit_products() -> bool:
    """Whether the processor has the instructions that vectorised four-bit products need. It is an estimate: the engine
    measures at load whether they are faster."""
    return bool(_processor_features() & _FOUR_BIT_PRODUCTS)


@cache
def _processor_features() -> frozenset[str]:
    return frozenset(Path("/proc/cpuinfo").read_text().split())
