"""The facts of a device for its kernels: a GPU, or the card for which they are compiled without a launch.

Tensors on torch's `meta` device have shapes and no memory. A pass over them compiles the kernels of a model for a card
(`pretend`), before there are weights, or where there is no card at all (`compilation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    capability: tuple[int, int]
    """(0, 0): no GPU; kernels are interpreted there, in tests."""
    num_processors: int
    """Streaming multiprocessors."""
    shared_bytes: int
    """The shared memory that one program may use."""
    total_bytes: int = 0
    """The size of its memory."""

    @property
    def name(self) -> str:
        """As compilers name it: `sm_90`."""
        return "sm_{}{}".format(*self.capability)


CPU = DeviceProperties((0, 0), 8, 99 << 10)
"""With the shared memory of the smallest supported devices."""
CARDS = {
    properties.name: properties
    for properties in (
        DeviceProperties((8, 0), 108, 163 << 10, 80 << 30),
        DeviceProperties((8, 6), 82, 99 << 10, 24 << 30),
        DeviceProperties((8, 9), 128, 99 << 10, 24 << 30),
        DeviceProperties((9, 0), 132, 227 << 10, 141 << 30),
        DeviceProperties((10, 0), 148, 227 << 10, 180 << 30),
        DeviceProperties((12, 0), 170, 99 << 10, 32 << 30),
    )
}
"""The largest card of each generation: A100, RTX 3090, RTX 4090, H100 and H200, B200, RTX 5090."""

_pretended: list[DeviceProperties] = []


def pretend(properties: DeviceProperties) -> None:
    """Compiles what runs on the `meta` device for this card, for the rest of the process. Raises RuntimeError after
    another card: kernels keep what they have found out about a device."""
    if _pretended and _pretended != [properties]:
        raise RuntimeError("kernels of this process are compiled for another card already")
    _pretended[:] = [properties]


def properties_of(device: torch.device) -> DeviceProperties:
    if device.type == "meta" and _pretended:
        return _pretended[0]
    return _properties_of_card(device) if device.type == "cuda" else CPU


@cache
def _properties_of_card(device: torch.device) -> DeviceProperties:
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in the stubs
    capability = (properties.major, properties.minor)
    return DeviceProperties(capability, properties.multi_processor_count, shared_bytes, properties.total_memory)
