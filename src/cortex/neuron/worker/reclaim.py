"""Did the memory of an unloaded model come back? A process that says "freed" is not believed."""

from __future__ import annotations

from dataclasses import dataclass

SLACK_BYTES = 64 * 1024 * 1024
"""Below this a worker's size moves by itself: caches, arenas, interpreter."""
MIN_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What an unload gave back, against what the load had taken."""

    expected_bytes: int
    freed_bytes: int
    others_at_work: bool = False
    """Other models shared the worker, so that the numbers cannot be pinned on this one."""

    @property
    def is_complete(self) -> bool:
        return self.others_at_work or is_reclaimed(self.expected_bytes, self.freed_bytes)

    def __str__(self) -> str:
        return f"{self.freed_bytes >> 20} MiB of {self.expected_bytes >> 20} MiB came back"


def is_reclaimed(expected_bytes: int, freed_bytes: int) -> bool:
    return freed_bytes >= expected_bytes * MIN_FRACTION - SLACK_BYTES
