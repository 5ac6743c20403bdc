"""Converts the position scaling of a GGUF file to the hub's `rope_scaling`.

Linear and YaRN scaling are metadata. LongRoPE has two tables of divisors, one per frequency. Llama 3 scaling has one,
and this module computes the parameters that produce it.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Final

from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.gguf.metadata import GGUFFile
from cortex.neuron.weights.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from cortex.neuron.weights.gguf.types import GGMLType

# The values of the published models, for heads that are too small for the table to determine them.
_LOW_FREQ_FACTOR: Final = 1.0
_HIGH_FREQ_FACTOR: Final = 4.0
_ORIGINAL_POSITIONS: Final = 8192
_TOLERANCE: Final = 1e-3
_STANDS_STILL: Final = 1e20
"""Pairs of dimensions that are divided by more do not turn."""
_YARN_SETTINGS: Final = {
    "yarn_attn_factor": ("attention_factor",),
    "yarn_beta_fast": ("beta_fast",),
    "yarn_beta_slow": ("beta_slow",),
    "yarn_log_multiplier": ("mscale", "mscale_all_dim"),
}


def rope_scaling(file: GGUFFile, architecture: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The hub's `rope_scaling` for the file, None if positions are not scaled; raises CheckpointError."""
    factors = _factors(file, head_dim, ROPE_FACTORS)
    if factors is not None and max(factors) >= _STANDS_STILL:
        return _proportional(file, factors)
    if factors is not None and any(factor != 1.0 for factor in factors):
        return _llama3(file, factors, theta, head_dim)
    short, long = (_factors(file, head_dim, name) for name in (SHORT_FACTORS, LONG_FACTORS))
    if short is not None and long is not None:
        scale = file.metadata.get(f"{architecture}.rope.scaling.attn_factor")
        longrope: dict[str, Any] = {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long)}
        return longrope | ({"attention_factor": scale} if isinstance(scale, float) else {})

    def key(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.rope.scaling.{name}", default)

    kind, factor = key("type", "none"), key("factor", 0.0)
    if kind == "none" or not isinstance(factor, float) or factor in (0.0, 1.0):
        return None
    if kind not in ("linear", "yarn") or not 0 < factor < math.inf:
        raise Unsupported(f"{file.path} scales positions by {str(kind)[:40]!r} × {factor}, which is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if isinstance(original := key("original_context_length"), int):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        for name, hub_names in _YARN_SETTINGS.items():
            if isinstance(value := key(name), float) and 0 < value < math.inf:
                scaling |= dict.fromkeys(hub_names, value)
    return scaling


def _factors(file: GGUFFile, head_dim: int, name: str) -> tuple[float, ...] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type is not GGMLType.F32 or tensor.shape != (head_dim // 2,):
        raise Malformed(f"{file.path}: {name} does not match heads of size {head_dim}; convert the model again")
    with file.path.open("rb") as raw:
        raw.seek(tensor.offset)
        factors = struct.unpack(f"<{head_dim // 2}f", raw.read(tensor.num_bytes))
    lowest = 1 if name == ROPE_FACTORS else 1e-3
    if not all(lowest <= factor < math.inf for factor in factors):
        raise Malformed(f"{file.path}: {name} holds a divisor below {lowest} or not finite; convert the model again")
    return factors


def _proportional(file: GGUFFile, factors: tuple[float, ...]) -> dict[str, Any]:
    """The first pairs of dimensions turn, the rest do not. Raises Unsupported for any other table."""
    turning = sum(factor < _STANDS_STILL for factor in factors)
    if turning == 0 or any(factor != 1.0 for factor in factors[:turning]):
        raise Unsupported(f"{file.path}: {ROPE_FACTORS} is not a proportional scaling; use a safetensors model")
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}


def _llama3(file: GGUFFile, factors: tuple[float, ...], theta: float, head_dim: int) -> dict[str, Any]:
    """Fit Llama 3 scaling to the table. Raises Unsupported if the fit does not reproduce the table.

    Short wavelengths have divisor 1, long ones `factor`. Between them 1/divisor is linear in the number of waves that
    fit the original context. Two points determine the slope and the offset of that line. Only ratios matter, so the
    low end is set to 1.
    """
    frequencies = [theta ** (-2 * index / head_dim) for index in range(head_dim // 2)]
    factor = float(f"{max(factors):.7g}")
    between = [
        (frequency / (2 * math.pi), (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for frequency, divisor in zip(frequencies, factors, strict=True)
        if 1.0 < divisor < factor * (1 - 1e-6)
    ]
    high, original = _HIGH_FREQ_FACTOR, float(_ORIGINAL_POSITIONS)
    if len(between) >= 2:
        (first_waves, first_blend), (last_waves, last_blend) = between[0], between[-1]
        slope = (first_blend - last_blend) / (first_waves - last_waves)
        root = last_blend - slope * last_waves
        if slope > 0 and root < 0:
            high = _snapped(1 - 1 / root)
            original = _snapped(slope * (high - _LOW_FREQ_FACTOR))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original) if original.is_integer() else original,
    }
    expected = [_divisor(frequency, factor, high, original) for frequency in frequencies]
    if any(abs(a - b) > _TOLERANCE * b for a, b in zip(factors, expected, strict=True)):
        raise Unsupported(f"{file.path}: {ROPE_FACTORS} is not a Llama 3 scaling; use a safetensors model")
    return scaling


def _snapped(value: float) -> float:
    """`value`, rounded to an integer if float32 rounding explains the difference."""
    return float(round(value)) if math.isclose(value, round(value), rel_tol=1e-5) else value


def _divisor(frequency: float, factor: float, high: float, original: float) -> float:
    waves = original * frequency / (2 * math.pi)
    if waves > high:
        return 1.0
    if waves < _LOW_FREQ_FACTOR:
        return factor
    blend = (waves - _LOW_FREQ_FACTOR) / (high - _LOW_FREQ_FACTOR)
    return 1 / ((1 - blend) / factor + blend)
