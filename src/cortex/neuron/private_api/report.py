"""All entries of the private API, for reports. Imports torch."""

from __future__ import annotations

import torch

from cortex.neuron.private_api import openmp, transformers, triton
from cortex.neuron.private_api import torch as private_torch
from cortex.neuron.private_api.entries import DeviceKind, PrivateEntry

ENTRIES: tuple[PrivateEntry, ...] = (*private_torch.ENTRIES, *openmp.ENTRIES, *triton.ENTRIES, *transformers.ENTRIES)


def probe_cheap(kind: DeviceKind) -> None:
    """Runs the quick probes of what a process with such a device may use."""
    for entry in ENTRIES:
        if kind in entry.kinds and not entry.is_lazy:
            _ = entry.is_usable


def problems() -> dict[str, str]:
    """Why entries cannot be used, and what happens instead, by name. Those that nothing has tried are not in it."""
    return {entry.name: f"{entry.problem}; instead: {entry.fallback}" for entry in ENTRIES if entry.problem is not None}


def probed() -> list[PrivateEntry]:
    """What the devices of this machine may use, all of it probed, which takes up to a second."""
    kinds = {"cpu", *(("cuda",) if torch.cuda.is_available() else ())}
    used = [entry for entry in ENTRIES if kinds & {*entry.kinds} and entry.applies()]
    for entry in used:
        _ = entry.is_usable
    return used
