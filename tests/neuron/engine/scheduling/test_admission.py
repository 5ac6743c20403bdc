"""Which sequences a step admits: next to those that may still need pages, and with pages from host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cortex.neuron.engine.kv.page_groups import Holding, IncomingPages, KVPages
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.admission import HasPage, HasState
from cortex.neuron.engine.scheduling.scheduler import Scheduler

from .planned_steps import PAGE, collect, other, planned, request, run_to_the_end, scheduler_of, spans


def test_burst_of_requests_is_planned_in_a_time_that_grows_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    lacking = KVPages.lacking

    def counted(pages: KVPages, holding: Holding, length: int) -> list[int]:
        nonlocal looks
        looks += 1
        return lacking(pages, holding, length)

    monkeypatch.setattr(KVPages, "lacking", counted)
    scheduler = scheduler_of(pages=512, rows=128, step_tokens=1024, mixed=512, reserved=8)
    for number in range(128):
        scheduler.add(other(str(number), 4, first=8 * number))
    assert len(planned(scheduler).rows) == 128, "all of them are admitted"
    assert looks < 128, "each running sequence is looked at once, and not for each that is admitted after it"


def test_sequence_waits_for_the_pages_that_those_admitted_before_it_in_the_same_step_reserve() -> None:
    scheduler = scheduler_of(pages=7, reserved=8)
    for number in range(3):
        scheduler.add(other(str(number), 4, first=8 * number, max_tokens=8))
    plan = planned(scheduler)
    assert [request.id for _, request, _ in plan.new_rows] == ["0", "1"], "each needs three pages to its end"
    collect(scheduler, plan)
    scheduler.drop(scheduler.running[0])
    assert [request.id for _, request, _ in planned(scheduler).new_rows] == ["2"], "its reserved pages are free again"


def test_pages_that_a_running_sequence_has_grown_into_are_not_reserved_again() -> None:
    scheduler = scheduler_of(pages=6, reserved=8)
    scheduler.add(other("0", 4, first=0, max_tokens=8))
    large = scheduler.add(other("large", 16, first=100, max_tokens=8))
    plan = planned(scheduler)
    assert [request.id for _, request, _ in plan.new_rows] == ["0"], "the other one needs all pages"
    scheduler.drop(large)
    for _ in range(5):
        collect(scheduler, plan)
        plan = planned(scheduler)
    collect(scheduler, plan)
    scheduler.add(other("1", 4, first=200, max_tokens=8))
    assert [request.id for _, request, _ in planned(scheduler).new_rows] == ["1"], "three pages are left for it"


class FakeOffloaded:
    """Pages of a few prefixes, which arrive when the test says so."""

    def __init__(self, pages: KVPages) -> None:
        self.known: set[Digest] = set()
        self.front = 0
        """Pages that are computed while the others are fetched."""
        self.transfers: set[str] = set()
        self.forgotten: list[Digest] = []
        self.ended_requests: list[str] = []
        self._pages = pages
        self._asked: set[str] = set()
        self._fetches: dict[str, Sequence[IncomingPages]] = {}

    def may_have(self, request_id: str, num_pages: int) -> bool:
        return num_pages > 0 and request_id not in self._asked

    def fetch(
        self,
        request_id: str,
        digests: Sequence[Digest],
        cached: int,
        last: int,
        usable: Callable[[HasPage, HasState], int],
    ) -> int | None:
        self._asked.add(request_id)
        count = usable(lambda _, digest: digest in self.known, lambda _: False)
        start = min(count * PAGE, last)
        incoming = self._pages.expect(digests, count, start, self.front) if count > cached else None
        if incoming is None:
            return None
        self._fetches[request_id] = incoming
        return max(cached, self.front)

    def is_fetching(self, request_id: str) -> bool:
        return request_id in self._fetches

    def is_receiving(self, request: EngineRequest) -> bool:
        return request.id in self._fetches or request.transfer in self.transfers

    def shortened_front(self, request_id: str, digests: Sequence[Digest], num_computed: int, front: int) -> int:
        return front

    def arrive(self, request_id: str) -> None:
        self._pages.arrived(self._fetches.pop(request_id))

    def fail(self, request_id: str) -> None:
        self._pages.gave_up(self._fetches.pop(request_id))

    def ended(self, request_id: str) -> None:
        self.ended_requests.append(request_id)

    def forget(self, digests: Sequence[Digest]) -> None:
        self.forgotten += digests


def offloading_scheduler(
    num_pages: int = 2, front: int = 0, *, step_tokens: int = 64, mixed: int | None = None
) -> tuple[Scheduler, FakeOffloaded]:
    """A prompt was computed, and its pages have left the device."""
    earlier, scheduler = scheduler_of(), scheduler_of(step_tokens=step_tokens, mixed=mixed)
    sequence = earlier.add(request("earlier", num_pages * PAGE))
    planned(earlier)
    offloaded = FakeOffloaded(scheduler.pages)
    offloaded.known.update(sequence.digests)
    offloaded.front = front
    scheduler.use_offloaded(offloaded)
    return scheduler, offloaded


def test_sequence_waits_for_its_pages_while_others_run() -> None:
    scheduler, offloaded = offloading_scheduler()
    scheduler.add(request("fetching", 2 * PAGE + 3))
    scheduler.add(other("other", 5, first=100, principal="somebody else"))
    first = scheduler.plan()
    assert first is not None
    assert [each.id for _, each, _ in first.new_rows] == ["other"]
    offloaded.arrive("fetching")
    plan = planned(scheduler)
    assert [each.id for _, each, _ in plan.new_rows] == ["fetching"]
    assert spans(plan)[-1] == (2 * PAGE, 3), "it continues after the pages that arrived"
    assert scheduler.running[-1].cached == 2 * PAGE


def test_front_of_a_prompt_is_computed_while_the_rest_is_fetched() -> None:
    scheduler, offloaded = offloading_scheduler(num_pages=6, front=2, step_tokens=PAGE)
    scheduler.add(request("fetching", 6 * PAGE + 3))
    computed = []
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        computed += spans(plan)
        by_row = {sequence.row: sequence for sequence in scheduler.running}
        for row in plan.rows:
            scheduler.row_read(by_row[row.row], row, 0)
    assert computed == [(0, PAGE), (PAGE, PAGE)]
    assert scheduler.plan() is None, "the pages after its front have not arrived"
    assert not scheduler.running, "another request can have its row"
    offloaded.arrive("fetching")
    plan = planned(scheduler)
    assert spans(plan) == [(6 * PAGE, 3)]
    assert scheduler.running[0].cached == 4 * PAGE, "its front was computed"
    assert scheduler.preemptions == 0


def test_prompt_whose_fetch_fails_continues_after_its_front() -> None:
    scheduler, offloaded = offloading_scheduler(num_pages=6, front=2)
    sequence = scheduler.add(request("fetching", 6 * PAGE + 3, max_tokens=1))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.row_read(sequence, plan.rows[0], 0)
    offloaded.fail("fetching")
    assert spans(planned(scheduler)) == [(2 * PAGE, 4 * PAGE + 3)]
    assert sequence.cached == 0
    scheduler.drop(sequence)
    assert scheduler.pages.num_held == 0


def test_prompt_that_loses_its_row_in_its_front_waits_and_is_then_computed_to_its_end() -> None:
    scheduler, offloaded = offloading_scheduler(num_pages=6, front=3, step_tokens=4 * PAGE)
    sequence = scheduler.add(request("fetching", 6 * PAGE + 3))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.retract(plan)
    assert scheduler.plan() is None
    offloaded.arrive("fetching")
    computed = [span for plan in run_to_the_end(scheduler) for span in spans(plan)]
    assert computed[:2] == [(0, 4 * PAGE), (4 * PAGE, 2 * PAGE + 3)]
    assert sequence.cached == 0


def test_steps_of_a_prompt_are_short_until_its_fetch_has_ended() -> None:
    scheduler, offloaded = offloading_scheduler(num_pages=8, front=6, step_tokens=2 * PAGE, mixed=PAGE)
    sequence = scheduler.add(request("fetching", 8 * PAGE + 3))
    computed = []
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        computed += spans(plan)
        scheduler.row_read(sequence, plan.rows[0], 0)
        if len(computed) == 2:
            offloaded.fail("fetching")
    assert computed == [(0, 2 * PAGE), (2 * PAGE, PAGE), (3 * PAGE, 2 * PAGE)], "the first step began before the fetch"


def test_steps_of_a_prompt_are_short_until_the_transfer_of_its_blocks_has_ended() -> None:
    scheduler, offloaded = offloading_scheduler(mixed=PAGE)
    offloaded.transfers.add("t")
    sequence = scheduler.add(replace(other("r", 6 * PAGE, first=100), transfer="t"))
    plan = planned(scheduler)
    assert spans(plan) == [(0, PAGE)]
    scheduler.row_read(sequence, plan.rows[0], 0)
    offloaded.transfers.clear()
    assert spans(planned(scheduler)) == [(PAGE, 5 * PAGE)]


def test_prompt_without_offloaded_pages_is_computed_at_once() -> None:
    scheduler, _ = offloading_scheduler()
    scheduler.add(other("new", 2 * PAGE, first=100))
    assert spans(planned(scheduler)) == [(0, 2 * PAGE)]


def test_offloaded_pages_learn_what_ended_and_what_cannot_be_trusted() -> None:
    scheduler, offloaded = offloading_scheduler()
    sequence = scheduler.add(request("r", 2 * PAGE, max_tokens=1))
    assert scheduler.plan() is None, "nothing else is to be computed"
    offloaded.arrive("r")
    scheduler.distrust(sequence)
    assert offloaded.forgotten == [*sequence.digests, sequence.tail]
    run_to_the_end(scheduler)
    assert offloaded.ended_requests == ["r"]
