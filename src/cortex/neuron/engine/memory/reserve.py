"""The device memory that models leave free: one rule for preflight, loads and reports to the gateway.

Imports no torch: the node uses it before there is an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

_CPU_SHARE = 0.5
"""Share of a host's free memory that a model leaves free: everything else on the host uses it, too."""
_GPU_BYTES = 1 << 30
_GPU_PART = 16
"""For activations and the libraries' own buffers: 1/16 of the device, and at least `_GPU_BYTES`."""


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    num_bytes: int
    share: float = 0.0
    """Share of the free memory; 0 to 1."""

    @classmethod
    def on(cls, kind: str, total_bytes: int, min_free_bytes: int = 0) -> MemoryReserve:
        """The rule for a device of this kind and size; `min_free_bytes`: what the operator reserves in addition."""
        if kind == "cpu":
            return cls(min_free_bytes, _CPU_SHARE)
        return cls(min_free_bytes + max(_GPU_BYTES, total_bytes // _GPU_PART))

    def bytes_of(self, free_bytes: int) -> int:
        """The part of `free_bytes` that a load leaves free."""
        return self.num_bytes + int(free_bytes * self.share)

    def usable_bytes(self, free_bytes: int) -> int:
        """The part of `free_bytes` that a load may take; negative if less is free than must stay free."""
        return free_bytes - self.bytes_of(free_bytes)
