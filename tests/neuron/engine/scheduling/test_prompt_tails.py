"""Prompts that come again, over pages that their earlier sequences continued."""

from __future__ import annotations

import pytest
from tests.neuron.engine.scheduling.planned_steps import (
    PAGE,
    collect,
    other,
    planned,
    request,
    run_to_the_end,
    scheduler_of,
    spans,
    token_costs,
)

from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.kv.pages import tail_digest
from cortex.neuron.engine.scheduling.budget import SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler


@pytest.mark.parametrize("length", range(PAGE + 1, 3 * PAGE + 1))
def test_prompt_that_comes_again_computes_its_last_token(length: int) -> None:
    scheduler = scheduler_of()
    scheduler.add(request("first", length))
    run_to_the_end(scheduler)
    again = scheduler.add(request("again", length))
    plan = planned(scheduler)
    assert spans(plan) == [(length - 1, 1)]
    assert again.cached == length - 1
    assert len(plan.page_copies) == (length % PAGE not in (0, 1)), "whole pages are shared, others copied"
    run_to_the_end(scheduler)


def test_longer_and_shorter_prompts_share_whole_pages_only() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("first", 11))
    run_to_the_end(scheduler)
    for name, length in (("longer", 12), ("shorter", 10)):
        scheduler.add(request(name, length))
        assert spans(planned(scheduler)) == [(8, length - 8)]
        scheduler.drop(scheduler.running[0])


def test_copied_page_is_the_one_of_the_running_sequence() -> None:
    scheduler = scheduler_of()
    first = scheduler.add(request("first", 11))
    collect(scheduler, planned(scheduler))
    again = scheduler.add(request("again", 11))
    plan = planned(scheduler)
    assert spans(plan) == [(11, 1), (10, 1)]
    (copy,) = plan.page_copies
    assert copy == (0, first.pages[0].pages[2], again.pages[0].pages[2])


def test_rows_of_one_step_do_not_copy_what_the_step_writes() -> None:
    """The full page is cached; the page after it is computed by both."""
    scheduler = scheduler_of()
    scheduler.add(request("earlier", PAGE + 1, max_tokens=1))
    run_to_the_end(scheduler)
    for name in "ab":
        scheduler.add(request(name, PAGE + 3, principal=name))
    plan = planned(scheduler)
    assert spans(plan) == [(PAGE, 3), (PAGE, 3)]
    assert not plan.page_copies


def test_page_that_is_used_again_is_not_copied() -> None:
    scheduler = scheduler_of(pages=4)
    scheduler.add(request("first", 7, max_tokens=1))
    run_to_the_end(scheduler)
    scheduler.add(other("others", 15, first=100, max_tokens=1))
    run_to_the_end(scheduler)
    scheduler.add(request("again", 7, max_tokens=1))
    assert spans(planned(scheduler)) == [(0, 7)]


def test_without_a_page_for_the_copy_the_last_page_is_computed() -> None:
    """The pool has the pages of one sequence, and no other."""
    scheduler = Scheduler(KVPages({None: 1 + 2}, PAGE), SchedulerLimits(1, 16, 1.0, 2 * PAGE), token_costs())
    scheduler.add(request("first", 7, max_tokens=1))
    run_to_the_end(scheduler)
    again = scheduler.add(request("again", 7, max_tokens=1))
    run_to_the_end(scheduler)
    assert again.cached == PAGE
    assert len(again.tokens) == 8


def test_sequence_that_lacked_a_page_that_was_being_copied_starts_with_the_next_step() -> None:
    """The long prompt is still being prefilled then, and nothing has ended."""
    scheduler = scheduler_of(pages=105, step_tokens=192, mixed=192, reserved=3)
    scheduler.add(request("first", 6, max_tokens=1))
    run_to_the_end(scheduler)
    scheduler.add(other("long", 400, first=1000, max_tokens=1, principal="long"))  # 101 pages
    collect(scheduler, planned(scheduler))
    scheduler.add(request("again", 6, max_tokens=4, principal="again"))  # three pages, one of them a copy
    scheduler.add(other("last", 3, first=100, max_tokens=1, principal="last"))
    plan = planned(scheduler)
    assert sorted(spans(plan)) == [(5, 1), (192, 187)]
    collect(scheduler, plan)
    assert (0, 3) in spans(planned(scheduler))


def test_distrusted_sequence_leaves_no_tail() -> None:
    scheduler = scheduler_of()
    sick = scheduler.add(request("sick", 11))
    planned(scheduler)
    scheduler.distrust(sick)
    scheduler.drop(sick)
    again = scheduler.add(request("again", 11))
    plan = planned(scheduler)
    assert spans(plan) == [(0, 11)]
    collect(scheduler, plan)
    scheduler.add(request("third", 11))
    ((_, source, _),) = planned(scheduler).page_copies
    assert source == again.pages[0].pages[2]


def test_failed_step_leaves_no_tail() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("first", PAGE + 1, max_tokens=1))
    run_to_the_end(scheduler)
    scheduler.add(request("again", PAGE + 3))
    for _ in range(2):
        plan = planned(scheduler)
        assert spans(plan) == [(PAGE, 3)]
        scheduler.retract(plan)
        scheduler.check_integrity()


def test_digest_of_a_tail_depends_on_everything_before_and_in_it() -> None:
    digests = {
        tail_digest(*arguments)
        for arguments in ((b"", (1, 2)), (b"x", (1, 2)), (b"", (1, 2, 3)), (b"", (1, 3)), (b"", (1, 2), b"picture"))
    }
    assert len(digests) == 5
