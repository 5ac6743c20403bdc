"""A divided model in one process: the leader on the calling thread, every other rank on a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.parallel.ranks import Follower, load_engine
from cortex.neuron.engine.request import LoadSpec, RankSpec
from cortex.neuron.engine.scheduling.step_plan import StepPlan


class QueueLink:
    """Announces plans through queues, in one process."""

    def __init__(self, num_followers: int = 1) -> None:
        self.queues = [queue.SimpleQueue[StepPlan | None]() for _ in range(num_followers)]

    def follow_others(self) -> None:
        pass

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def announce(self, plan: StepPlan | None) -> None:
        for each in self.queues:
            each.put(plan)


class RankThreads:
    """`specs`: what each rank loads, without its place. Followers that fail keep their error in `errors`. `hosts`: the
    host memory of each rank for its pages; None: they are lost."""

    def __init__(
        self, specs: Sequence[LoadSpec], directory: Path, hosts: Sequence[DeviceHostMemory | None] | None = None
    ) -> None:
        self._hosts = hosts or [None] * len(specs)
        self.link = QueueLink(len(specs) - 1)
        self.followers: dict[int, Follower] = {}
        self.errors: dict[int, Exception] = {}
        placed = [replace(spec, rank=RankSpec(rank, len(specs), str(directory))) for rank, spec in enumerate(specs)]
        self._threads = [threading.Thread(target=self._follow, args=(spec,)) for spec in placed[1:]]
        for thread in self._threads:
            thread.start()
        self.leader = load_engine(placed[0], "cpu", lambda *_: None, lambda: False, self.link)
        if self._hosts[0] is not None:
            self.leader.keep_pages(self._hosts[0])

    def _follow(self, spec: LoadSpec) -> None:
        assert spec.rank is not None
        engine = load_engine(spec, "cpu", lambda *_: None, lambda: False)
        assert isinstance(engine, Follower)
        rank = spec.rank.rank
        if (host := self._hosts[rank]) is not None:
            engine.keep_pages(host)
        self.followers[rank] = engine
        try:
            while (plan := self.link.queues[rank - 1].get()) is not None:
                engine.follow(plan)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.errors[rank] = error
        engine.close()

    @property
    def follower(self) -> Follower:
        return self.followers[1]

    def end_followers(self) -> None:
        """The followers close their engines, as dying processes close their sockets."""
        self.link.announce(None)
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        self.end_followers()
        self.leader.close()
