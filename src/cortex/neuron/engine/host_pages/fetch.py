"""Blocks on their way from host memory and disk to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cortex.neuron.engine.host_pages.copies import RunningCopy
from cortex.neuron.engine.host_pages.disk_reads import DiskFetch
from cortex.neuron.engine.host_pages.store import BlockPlace
from cortex.neuron.engine.kv.page_groups import IncomingPages
from cortex.neuron.engine.kv.pages import Digest


@dataclass(frozen=True, slots=True)
class Fetch:
    """Of the blocks of one waiting prompt."""

    copies: tuple[RunningCopy, ...]
    pages: Sequence[IncomingPages]
    state: tuple[int, Digest] | None
    places: tuple[BlockPlace, ...]
    num_tokens: int
    num_bytes: int
    started_s: float
    from_disk: DiskFetch | None = None

    @property
    def is_complete(self) -> bool:
        is_read = self.from_disk is None or self.from_disk.is_complete
        return is_read and all(copy.is_complete for copy in self.copies)

    def wait(self, wait_s: float | None) -> None:
        """At most so long for a disk, and for all copies from host memory; None: until it is complete."""
        if self.from_disk is not None:
            self.from_disk.wait(wait_s)
        for copy in self.copies if wait_s is None or self.from_disk is None else ():
            copy.wait()
