"""Which sequences a step admits next to those that may still need pages."""

from __future__ import annotations

import pytest

from cortex.neuron.engine.kv.page_groups import Holding, KVPages

from .planned_steps import collect, other, planned, scheduler_of


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
