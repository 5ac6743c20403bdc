"""The dtype that a model computes in. Imports no torch: the node uses it before there is an engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cortex.neuron.kernels.native.library import may_have_library

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BFLOAT16_PRODUCTS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_CODE_PRODUCTS = frozenset({"asimddp", "i8mm", "avx2", "avx512f"})


def dtype_name(wanted: str, device_kind: str) -> str:
    """The name of the dtype that a model computes in; `auto` is the fastest on the device."""
    if wanted != "auto":
        return wanted
    if device_kind == "cuda" or _processor_features() & _BFLOAT16_PRODUCTS:
        return "bfloat16"
    return "float32"  # without bfloat16 dot products the faster of the two


def likely_multiplies_codes() -> bool:
    """An estimate of whether quantised matrices stay quantised on this CPU. The engine measures at load what is faster,
    and only the first load on a host shows whether the C functions compile."""
    return bool(_processor_features() & _CODE_PRODUCTS) and may_have_library()


@cache
def _processor_features() -> frozenset[str]:
    return frozenset(Path("/proc/cpuinfo").read_text().split())
