"""Pages of several KV groups: what a sequence holds of each, and after which prefixes it can continue."""

from __future__ import annotations

import pytest

from cortex.neuron.engine.kv.page_groups import Holding, KVPages, Window, window_pages
from cortex.neuron.engine.kv.pages import ROOT, page_digests

PAGE = 4
DIGESTS = page_digests(ROOT, range(100), PAGE)


def pages_of(counts: dict[Window, int]) -> KVPages:
    return KVPages({window: count + 1 for window, count in counts.items()}, PAGE)


def advance(pages: KVPages, holding: Holding, start: int, stop: int) -> None:
    """Computes positions one at a time and names each page once it is full."""
    for position in range(start, stop):
        pages.trim(holding, position)
        assert pages.extend(holding, position + 1) is not None
        if (position + 1) % PAGE == 0:
            pages.commit(holding, position // PAGE, DIGESTS[position // PAGE])
    pages.check_integrity([holding])


def held(holding: Holding) -> list[tuple[int, int]]:
    return [(each.first, each.end) for each in holding]


@pytest.mark.parametrize("page_tokens", [1, 2, 4, 7])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 13])
def test_window_lies_in_at_most_its_pages(window: int, page_tokens: int) -> None:
    spans = [(last // page_tokens) - (last + 1 - window) // page_tokens + 1 for last in range(window - 1, 200)]
    assert max(spans) == window_pages(window, page_tokens)


def test_sequence_holds_all_pages_without_a_window_and_the_latest_with_one() -> None:
    pages = pages_of({None: 20, 10: 4, 1: 1})
    holding = pages.hold((), 0, 0)
    advance(pages, holding, 0, 61)
    assert held(holding) == [(0, 16), (12, 16), (15, 16)]  # positions 51 to 60, and 60
    pages.release(holding)
    assert [group.pool.num_held for group in pages.groups] == [0, 0, 0]


def test_prefix_continues_where_its_last_window_is_known() -> None:
    pages = pages_of({None: 20, 10: 20})
    holding = pages.hold((), 0, 0)
    advance(pages, holding, 0, 40)
    pages.release(holding)
    assert [*pages.match(DIGESTS)] == list(range(11))  # released pages are known until they are used again
    pages.groups[1].pool.disown(DIGESTS[4:5])
    assert [*pages.match(DIGESTS)] == [0, 1, 2, 3, 4, 8, 9, 10]  # eight pages are 32 positions: page 4 ends at 20
    pages.groups[0].pool.disown(DIGESTS[9:10])
    assert [*pages.match(DIGESTS)] == [0, 1, 2, 3, 4, 8, 9]
    continued = pages.hold(DIGESTS, 8, 8 * PAGE)
    assert held(continued) == [(0, 8), (5, 8)]
    advance(pages, continued, 32, 36)


def test_model_of_windows_only_continues_without_the_beginning() -> None:
    pages = pages_of({10: 4})
    holding = pages.hold((), 0, 0)
    advance(pages, holding, 0, 60)
    pages.release(holding)
    assert [*pages.match(DIGESTS)] == [0, 14, 15]  # one page more than a window has
    assert held(pages.hold(DIGESTS, 15, 15 * PAGE)) == [(12, 15)]


def test_pages_are_added_to_all_groups_or_to_none() -> None:
    pages = pages_of({None: 4, 10: 3})
    holding = pages.hold((), 0, 0)
    assert pages.extend(holding, 16) is None
    assert held(holding) == [(0, 0), (0, 0)]
    assert pages.reach(holding, 16, takes_pages=True) == 12
    added = pages.extend(holding, 12)
    assert added is not None
    assert [(group, first, len(numbers)) for group, first, numbers in added] == [(0, 0, 3), (1, 0, 3)]
    assert pages.extend(holding, 12) == ()


def test_admission_counts_a_window_once_and_the_rest_in_full() -> None:
    pages = pages_of({None: 20, 10: 8})
    first = pages.hold((), 0, 0)
    pages.extend(first, 4)
    assert pages.lacking(first, 40) == [9, 3]
    assert pages.fits((), 0, 0, 40, [9, 3])
    assert not pages.fits((), 0, 0, 41, [9, 3]), "21 pages without a window"
    second = pages.hold((), 0, 0)
    pages.extend(second, 4)
    assert pages.lacking(second, 12) == [2, 2]
    assert not pages.fits((), 0, 0, 12, [11, 5]), "11 pages with one"


def test_prefix_that_fits_can_continue() -> None:
    pages = pages_of({None: 20, 5: 3})
    holding = pages.hold((), 0, 0)
    advance(pages, holding, 0, 4 * PAGE)
    pages.release(holding)
    other = pages.hold((), 0, 0)
    pages.extend(other, PAGE)
    start = 4 * PAGE
    assert pages.fits(DIGESTS, 4, start, start + 8, pages.lacking(other, PAGE))
    continued = pages.hold(DIGESTS, 4, start)
    assert pages.extend(continued, start + 1), "there is a page for the next token"
    pages.check_integrity([other, continued])


@pytest.mark.parametrize("tight", [0, 1])
def test_fetch_that_one_group_has_no_pages_for_changes_nothing(tight: int) -> None:
    pages = pages_of({None: 6, 10 * PAGE: 6})
    holding = pages.hold((), 0, 0)
    advance(pages, holding, 0, 4 * PAGE)
    pages.release(holding)
    assert pages.groups[tight].pool.allocate(2) is not None, "those of another sequence"
    idle = [list(group.pool.idle()) for group in pages.groups]
    assert pages.expect(DIGESTS[10:15], 5, 5 * PAGE) is None
    assert pages.expect((*DIGESTS[:2], *DIGESTS[10:14]), 6, 6 * PAGE) is None
    assert [list(group.pool.idle()) for group in pages.groups] == idle


def test_front_is_not_computed_meanwhile_with_windows() -> None:
    """The pages from which the front is computed lie behind the window of the fetched ones, which may evict them."""
    with pytest.raises(AssertionError, match="waits for all of its prefix"):
        pages_of({None: 12, 5: 4}).expect(DIGESTS, 8, 8 * PAGE, first=4)


def test_prefix_of_which_a_page_is_gone_is_not_held() -> None:
    pages = pages_of({None: 8, 5: 8})
    holding = pages.hold((), 0, 0)
    advance(pages, holding, 0, 4 * PAGE)
    pages.release(holding)
    pages.groups[1].pool.disown(DIGESTS[3:4])
    with pytest.raises(AssertionError, match="not known any more"):
        pages.hold(DIGESTS, 4, 4 * PAGE)


def test_use_is_reported_of_the_fullest_group() -> None:
    pages = pages_of({None: 100, 10: 10})
    assert pages.num_held == 0
    holding = pages.hold((), 0, 0)
    pages.extend(holding, 4 * PAGE)
    assert (pages.num_pages, pages.num_held) == (100, 40)
    advance(pages, holding, 4 * PAGE, 24 * PAGE)
    assert pages.num_held == 30
