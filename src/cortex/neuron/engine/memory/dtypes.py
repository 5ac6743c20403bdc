"""The dtype that a model computes in. Imports no torch: the node uses it before there is an engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cortex.neuron.kernels.cpu.layout import CpuForm
from cortex.neuron.kernels.native.library import may_have_library

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BFLOAT16_PRODUCTS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_ARM_CODE_PRODUCTS = frozenset({"asimddp", "i8mm"})
_CODE_PRODUCTS = _ARM_CODE_PRODUCTS | {"avx2", "avx512f"}


def dtype_name(wanted: str, device_kind: str) -> str:
    """The name of the dtype that a model computes in; `auto` is the fastest on the device."""
    if wanted != "auto":
        return wanted
    if device_kind == "cuda" or _processor_features() & _BFLOAT16_PRODUCTS:
        return "bfloat16"
    return "float32"  # without bfloat16 dot products the faster of the two


def likely_cpu_form() -> CpuForm | None:
    """The form of quantised matrices that the processor has the instructions for. It is an estimate: the engine
    measures at load what is fastest, and only the first load on a host shows that our own cannot be compiled."""
    features = _processor_features()
    if features & _CODE_PRODUCTS and may_have_library():
        return CpuForm.NATIVE
    return CpuForm.DYNAMIC if features & _ARM_CODE_PRODUCTS else None


@cache
def _processor_features() -> frozenset[str]:
    return frozenset(Path("/proc/cpuinfo").read_text().split())
