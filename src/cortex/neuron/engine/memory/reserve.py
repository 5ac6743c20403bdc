"""What stays free on a device beside its models: the one rule by which a load is refused, planned and told to others.

Imports no torch: the node reckons with it before there is an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

_CPU_SHARE = 0.5
"""Of the free memory of a host, what one model leaves on its CPU: everything else on the host lives there, too."""
_GPU_BYTES = 1 << 30
_GPU_PART = 16
"""Activations and the libraries' own buffers: one part in so many of the device, and at least `_GPU_BYTES`."""


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    num_bytes: int
    share: float = 0.0
    """Of what is free; 0 to 1."""

    @classmethod
    def on(cls, kind: str, total_bytes: int, min_free_bytes: int = 0) -> MemoryReserve:
        """The rule for a device of this kind and size; `min_free_bytes` is what the operator wants on top."""
        if kind == "cpu":
            return cls(min_free_bytes, _CPU_SHARE)
        return cls(min_free_bytes + max(_GPU_BYTES, total_bytes // _GPU_PART))

    def bytes_of(self, free_bytes: int) -> int:
        """What a load leaves of so much free memory."""
        return self.num_bytes + int(free_bytes * self.share)

    def usable_bytes(self, free_bytes: int) -> int:
        """What a load may take of so much free memory; negative where less is free than is to stay."""
        return free_bytes - self.bytes_of(free_bytes)
