"""Copies of blocks to host memory while the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors, RunningCopy
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.store import BlockKind, BlockPlace, HostPages
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class OutgoingBlocks:
    """Blocks of one kind that are being copied. Host memory does not know them before `publish`."""

    copy: RunningCopy
    kind: BlockKind
    group: int | None
    """The KV group of the pages; None: they are states."""
    ids: frozenset[int]
    places: tuple[tuple[Digest, BlockPlace], ...]

    @classmethod
    def start(
        cls,
        copies: BlockCopies,
        tensors: BlockTensors,
        kind: BlockKind,
        group: int | None,
        blocks: Sequence[tuple[int, Digest]],
        store: HostPages,
    ) -> Self | None:
        """Starts to copy as many of these blocks as `store` has room for. None if it has no room, or if the device has
        no memory for a copy now."""
        places = store.reserve(kind, len(blocks))
        if not places:
            return None
        blocks = blocks[: len(places)]
        ids = [id for id, _ in blocks]
        try:
            copy = copies.to_host(tensors, ids, places)
        except torch.OutOfMemoryError:
            store.end(places)
            return None
        digests = (digest for _, digest in blocks)
        return cls(copy, kind, group, frozenset(ids), tuple(zip(digests, places, strict=True)))

    def precede(self, plan: StepPlan) -> None:
        """Makes a step that overwrites blocks being copied wait for the copy."""
        if self.group is None:
            written = list(plan.written_slots)
        else:
            written = [page for _, group, _, pages in plan.new_pages if group == self.group for page in pages]
        if not self.ids.isdisjoint(written):
            self.copy.precede_steps()

    def publish(self, host: DeviceHostMemory) -> None:
        """Makes the blocks known. The copy must be complete."""
        for digest, place in self.places:
            host.publish(self.kind, digest, place)
