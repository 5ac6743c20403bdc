"""Copies that end late, as those on a stream of their own do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import torch

from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors, IncomingCopies, RunningCopy
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.store import BlockPlace

MOST_LOOKS = 8


@dataclass(frozen=True, slots=True, eq=False)
class LateCopy(RunningCopy):
    """Runs when somebody waits for it, or after a few looks at it; those that were started before it run first."""

    stream: list[LateCopy] = field(kw_only=True)
    run: Callable[[], object] = field(kw_only=True)
    looks: list[None] = field(kw_only=True)
    """How many times it is still found incomplete."""

    @property
    def is_complete(self) -> bool:
        if self not in self.stream:
            return True
        if self.looks:
            self.looks.pop()
            return False
        self.wait()
        return True

    def wait(self) -> None:
        while self in self.stream:
            self.stream.pop(0).run()

    def precede_steps(self) -> None:
        self.wait()


class LateCopies(BlockCopies):
    """On a CPU. Steps that do not wait for a copy run before it."""

    random = Random(0)
    failing_share = 0.1
    """The share of copies that fail, because the device has no memory for their buffer."""

    def __init__(self, slabs: HostSlabs, device: torch.device) -> None:
        super().__init__(slabs, device)
        self._running: list[LateCopy] = []

    def _run(
        self, blocks: BlockTensors, ids: Sequence[int], places: Sequence[BlockPlace], *, is_outward: bool
    ) -> RunningCopy:
        if self.random.random() < self.failing_share:
            raise torch.OutOfMemoryError
        run = partial(super()._run, blocks, tuple(ids), tuple(places), is_outward=is_outward)
        looks = [None] * self.num_looks(is_outward=is_outward)
        self._running.append(LateCopy(None, stream=self._running, run=run, looks=looks))
        return self._running[-1]

    def precede(self, stream: object) -> None:
        if self._running:
            self._running[-1].wait()

    def incoming(self, slabs: HostSlabs) -> LateIncoming:
        return LateIncoming(slabs, self._device, self)

    def num_looks(self, *, is_outward: bool) -> int:
        """How many times a copy is found incomplete."""
        return self.random.randint(0, MOST_LOOKS)


class LateIncoming(IncomingCopies):
    """On a thread of their own. Some of them fail, as those of `others` do."""

    def __init__(self, slabs: HostSlabs, device: torch.device, others: LateCopies) -> None:
        super().__init__(slabs, device, others)
        self._failing_share = others.failing_share
        self._random = Random(0)

    def _run(
        self, blocks: BlockTensors, ids: Sequence[int], places: Sequence[BlockPlace], *, is_outward: bool
    ) -> RunningCopy:
        if self._random.random() < self._failing_share:
            raise torch.OutOfMemoryError
        time.sleep(self._random.choice((0.0, 0.0, 0.002)))
        return super()._run(blocks, ids, places, is_outward=is_outward)


class LateOutward(LateCopies):
    """Copies to host memory end when somebody waits for them, others at once."""

    failing_share = 0.0

    def num_looks(self, *, is_outward: bool) -> int:
        return 10_000 if is_outward else 0
