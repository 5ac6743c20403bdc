"""Random traces of a scheduler whose prompts get pages from elsewhere, and compute the pages before those meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cortex.neuron.engine.kv.page_groups import IncomingPages
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.admission import HasPage, HasState
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.sequence import Sequence

from .test_traces import Device, Trace, histories


@dataclass
class Fetch:
    tokens: list[int]
    tenant: bytes
    digests: list[Digest]
    pages: Ordered[IncomingPages]
    num_steps: int
    """Until it ends."""


@dataclass
class Elsewhere:
    """Has some leading pages of every prompt."""

    scheduler: Scheduler
    device: Device
    random: Random
    incoming: list[IncomingPages]
    fetches: dict[str, Fetch] = field(default_factory=dict)
    looked_for: set[str] = field(default_factory=set)
    num_fronts: int = 0
    num_further: int = 0

    def may_have(self, request_id: str, num_pages: int) -> bool:
        return num_pages > 0 and request_id not in self.looked_for

    def fetch(
        self,
        request_id: str,
        digests: Ordered[Digest],
        cached: int,
        last: int,
        usable: Callable[[HasPage, HasState], int],
    ) -> int | None:
        self.looked_for.add(request_id)
        pages = self.scheduler.pages
        here = set(digests[: self.random.randint(0, len(digests))])
        count = usable(lambda _, digest: digest in here, lambda _: False)
        if count <= cached:
            return None
        front = cached if pages.has_windows else self.random.randint(cached, count - 1)
        start = min(count * pages.page_tokens, last)
        expected = pages.expect(digests, count, start, front if front > cached else 0)
        if expected is None:
            return None
        (sequence,) = (each for each in self.scheduler.waiting if each.request.id == request_id)
        self._begin(sequence, expected)
        self.num_fronts += front > cached
        return front

    def is_fetching(self, request_id: str) -> bool:
        return request_id in self.fetches

    def is_receiving(self, request: EngineRequest) -> bool:
        return request.id in self.fetches or (bool(request.transfer) and self.random.random() < 0.5)

    def shortened_front(self, request_id: str, digests: Ordered[Digest], num_computed: int, front: int) -> int:
        """Sometimes the next pages before those that have arrived come, too, or some without any planned."""
        end, pages = front or self.random.randint(0, len(digests)), self.scheduler.pages
        is_fetching = request_id in self.fetches
        if is_fetching or pages.has_windows or num_computed >= end or self.random.random() < 0.3:
            return front
        earlier = self.random.randint(num_computed, end - 1)
        expected = pages.expect(digests, end, end * pages.page_tokens, earlier)
        if expected is None:
            return front
        (sequence,) = (each for each in self.scheduler.running if each.request.id == request_id)
        self._begin(sequence, expected)
        self.num_further += 1
        return earlier

    def _begin(self, sequence: Sequence, expected: Ordered[IncomingPages]) -> None:
        request, num_steps = sequence.request, self.random.randint(0, 6)
        fetch = Fetch(list(sequence.tokens), request.tenant, list(sequence.digests), expected, num_steps)
        self.fetches[request.id] = fetch
        self.incoming += expected
        for each in expected:
            for page in each.new_pages:
                self.device.overwrite(each.group, page, [-1] * self.scheduler.pages.page_tokens)

    def ended(self, request_id: str) -> None:
        self.looked_for.discard(request_id)
        if request_id in self.fetches:  # which ends all the same
            self.fetches[f"ended {request_id}"] = self.fetches.pop(request_id)

    def forget(self, digests: Ordered[Digest]) -> None:
        pass

    def step(self) -> None:
        for name, fetch in list(self.fetches.items()):
            fetch.num_steps -= 1
            if fetch.num_steps < 0:
                del self.fetches[name]
                self._end(name, fetch)

    def _end(self, name: str, fetch: Fetch) -> None:
        self.incoming[:] = [each for each in self.incoming if each not in fetch.pages]
        pages = self.scheduler.pages
        if self.random.random() < 0.2:
            pages.gave_up(fetch.pages)
            self.looked_for.discard(name)
            return
        past = histories(fetch.tokens, fetch.tenant)
        for each in fetch.pages:
            for page, digest in zip(each.new_pages, each.new_digests, strict=True):
                start = fetch.digests.index(digest) * pages.page_tokens
                self.device.overwrite(each.group, page, past[start : start + pages.page_tokens])
        pages.arrived(fetch.pages)


MOST_STEPS = 2000
"""Until all requests have ended, also after a failure in the middle of a step."""


class FetchTrace(Trace):
    def _begun(self) -> None:
        self.elsewhere = Elsewhere(self.scheduler, self.device, Random(0), self.incoming)
        self.scheduler.use_offloaded(self.elsewhere)

    @rule(seed=st.integers(0, 1 << 30))
    def chances_change(self, seed: int) -> None:
        self.elsewhere.random.seed(seed)

    def _step(self, drafted: Mapping[str, tuple[int, ...]]) -> None:
        self.elsewhere.step()
        super()._step(drafted)

    def teardown(self) -> None:
        for _ in range(MOST_STEPS):
            if not hasattr(self, "elsewhere") or not (self.live or self.elsewhere.fetches):
                break
            self.step()
        else:
            raise AssertionError(f"{len(self.live)} requests do not end")
        super().teardown()


FetchTrace.TestCase.settings = settings(stateful_step_count=40)
TestFetchTrace = FetchTrace.TestCase
