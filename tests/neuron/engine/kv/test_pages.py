"""The page pool: every page is in exactly one state, and a digest always leads to its contents."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cortex.neuron.engine.kv.pages import PADDING_PAGE, ROOT, PagePool, page_digests, tail_digest


def digests(*pages: tuple[int, ...]) -> list[bytes]:
    return page_digests(ROOT, [token for page in pages for token in page], len(pages[0]))


def committed(pool: PagePool, *chain: bytes) -> list[int]:
    """Held pages with the digests of `chain`."""
    pages = pool.allocate(len(chain))
    assert pages is not None
    for page, digest in zip(pages, chain, strict=True):
        pool.commit(page, digest)
    return pages


def test_digest_covers_the_page_and_everything_before_it() -> None:
    first, second = digests((1, 2), (3, 4))
    assert digests((1, 2)) == [first]
    assert page_digests(first, (3, 4), 2) == [second]
    others = [*digests((3, 4)), *digests((2, 1)), *page_digests(second, (3, 4), 2)]
    assert len({first, second, *others}) == 5


def test_only_full_pages_have_a_digest() -> None:
    assert page_digests(ROOT, (1, 2, 3, 4, 5), 2) == digests((1, 2), (3, 4))
    assert page_digests(ROOT, (1,), 2) == []


@pytest.mark.parametrize("num_pages", [0, 1, 31, 32, 33, 64, 100])
def test_digests_of_many_pages_are_those_of_one_after_the_other(num_pages: int) -> None:
    tokens = [(7 * place) % 1000 for place in range(2 * num_pages + 1)]
    chain, parent = [], ROOT
    for first in range(0, 2 * num_pages, 2):
        (parent,) = page_digests(parent, tokens[first : first + 2], 2)
        chain.append(parent)
    for _ in range(2):  # the second time from what is remembered
        assert page_digests(ROOT, tokens, 2) == chain


def test_remembered_digests_are_those_of_equal_pages_after_equal_ones() -> None:
    tokens = list(range(64))
    chain = page_digests(ROOT, tokens, 2)
    assert page_digests(chain[0], tokens, 2) != chain
    assert page_digests(ROOT, [*tokens[:-1], 64], 2)[:-1] == chain[:-1]
    assert page_digests(ROOT, [*tokens[:-1], 64], 2) != chain
    salted = page_digests(ROOT, tokens, 2, [b"", b"picture", *[b""] * 30])
    assert salted[:1] == chain[:1]
    assert set(salted[1:]).isdisjoint(chain)
    chain.clear()
    assert len(page_digests(ROOT, tokens, 2)) == 32, "the caller owns the list"


TENANTS = st.one_of(st.just(ROOT), st.binary(min_size=16, max_size=16))


@given(
    tenants=st.tuples(TENANTS, TENANTS).filter(lambda pair: pair[0] != pair[1]),
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=80),
    salts=st.lists(st.sampled_from([b"", b"of a picture"]), min_size=40, max_size=40),
    has_pictures=st.booleans(),
)
def test_pages_and_tails_of_different_tenants_never_have_the_same_digest(
    tenants: tuple[bytes, bytes], tokens: list[int], salts: list[bytes], has_pictures: bool
) -> None:
    shown = salts[: len(tokens) // 2] if has_pictures else []
    first, second = (page_digests(tenant, tokens, 2, shown) for tenant in tenants)
    assert first == page_digests(tenants[0], tokens, 2, shown)
    assert set(first).isdisjoint(second)
    assert tail_digest(first[-1], tokens[:1]) != tail_digest(second[-1], tokens[:1])
    pool = PagePool(len(first) + 1, 2)
    committed(pool, *first)
    assert pool.match(second) == []
    assert len(pool.match(first)) == len(first)


def test_digest_accepts_the_largest_token_ids() -> None:
    assert digests((2**32 - 1,)) != digests((2**31,))


def test_padding_page_is_never_allocated() -> None:
    pool = PagePool(5, 2)
    pages = pool.allocate(4)
    assert pages is not None
    assert PADDING_PAGE not in pages
    assert sorted(pages) == [1, 2, 3, 4]
    assert pool.num_pages == 4
    assert pool.allocate(1) is None


def test_rejects_a_pool_without_usable_pages() -> None:
    with pytest.raises(ValueError, match="padding page"):
        PagePool(1, 2)


def test_allocating_too_much_changes_nothing() -> None:
    pool = PagePool(4, 2)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_held) == (1, 2)
    pool.check_integrity([held])


def test_released_pages_with_a_digest_stay_cached_and_others_are_blank() -> None:
    pool = PagePool(4, 2)
    chain = digests((1, 2))
    (named,) = committed(pool, *chain)
    allocated = pool.allocate(1)
    assert allocated is not None
    (anonymous,) = allocated
    pool.release([named, anonymous])
    assert (pool.num_idle, pool.num_free, pool.num_held) == (1, 3, 0)
    assert pool.match(chain) == [named]


def test_match_stops_at_the_first_unknown_page() -> None:
    pool = PagePool(8, 1)
    chain = digests((1,), (2,), (3,))
    pages = committed(pool, chain[0], chain[1])
    assert pool.match(chain) == pages
    assert pool.match([chain[2], chain[0]]) == []


def test_held_page_leaves_the_free_set_once() -> None:
    pool = PagePool(4, 1)
    chain = digests((1,), (2,))
    pages = committed(pool, *chain)
    pool.release(pages)
    assert pool.num_idle_among(pages) == 2
    pool.hold(pages)
    pool.hold(pages)
    assert pool.num_idle_among(pages) == 0
    assert pool.num_held == 2
    pool.release(pages)
    assert pool.num_held == 2
    pool.release(pages)
    pool.check_integrity([])


def test_allocates_blank_pages_first_then_the_least_recently_used() -> None:
    pool = PagePool(4, 1)
    old, new = digests((1,)), digests((2,))
    (first,), (second,) = committed(pool, *old), committed(pool, *new)
    pool.release([first])
    pool.release([second])
    pool.hold([first])
    pool.release([first])  # used again: now `second` is the least recently used
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) == [second]
    assert pool.match(new) == []
    assert pool.match(old) == [first]


def test_prefix_is_evicted_from_its_end() -> None:
    pool = PagePool(4, 1)
    chain = digests((1,), (2,), (3,))
    pages = committed(pool, *chain)
    pool.release(pages)
    pool.allocate(1)
    assert pool.match(chain) == pages[:2]


def test_first_page_of_a_digest_stays_its_page() -> None:
    pool = PagePool(4, 1)
    chain = digests((1,))
    (first,), (second,) = committed(pool, *chain), committed(pool, *chain)
    assert pool.match(chain) == [first]
    pool.release([second])
    assert pool.num_idle == 0
    pool.release([first])
    assert pool.match(chain) == [first]


def test_disowned_prefix_is_not_matched_whether_held_or_idle() -> None:
    pool = PagePool(4, 1)
    held, idle = digests((1,)), digests((2,))
    (page,), (resting,) = committed(pool, *held), committed(pool, *idle)
    pool.release([resting])
    pool.disown([*held, *idle, *digests((3,))])
    assert pool.match(held) == pool.match(idle) == []
    assert pool.num_idle == 0
    pool.check_integrity([[page]])
    pool.release([page])
    pool.check_integrity([])


class PoolMachine(RuleBasedStateMachine):
    """Random use of a small pool, compared with a model of its holders and contents."""

    chains = Bundle("chains")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, 1)
        self.contents: dict[int, bytes] = {}
        """The digest that a holder last committed for each page."""
        self.held: list[list[int]] = []

    @rule(target=chains, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def take(self, tokens: list[int]) -> tuple[list[int], list[bytes]]:
        chain = digests(*((token,) for token in tokens))
        known = self.pool.match(chain)
        for page, digest in zip(known, chain, strict=False):
            assert self.contents[page] == digest, "a name leads to a page with other contents"
        self.pool.hold(known)
        fresh = self.pool.allocate(len(chain) - len(known))
        if fresh is None:
            self.pool.release(known)
            return [], []
        assert not set(fresh) & {page for pages in self.held for page in pages}, "a held page was handed out"
        for page, digest in zip(fresh, chain[len(known) :], strict=True):
            self.contents[page] = digest
        pages = known + fresh
        self.held.append(pages)
        return pages, chain

    @rule(taken=chains, count=st.integers(0, 4))
    def commit(self, taken: tuple[list[int], list[bytes]], count: int) -> None:
        pages, chain = taken
        if any(pages is mine for mine in self.held):
            for page, digest in list(zip(pages, chain, strict=True))[:count]:
                self.pool.commit(page, digest)

    @rule(taken=consumes(chains))
    def release(self, taken: tuple[list[int], list[bytes]]) -> None:
        pages, _ = taken
        for index, mine in enumerate(self.held):
            if mine is pages:
                self.pool.release(self.held.pop(index))
                return

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def disown(self, tokens: list[int]) -> None:
        chain = digests(*((token,) for token in tokens))
        self.pool.disown(chain)
        assert self.pool.match(chain) == []

    @invariant()
    def state_is_consistent(self) -> None:
        self.pool.check_integrity(self.held)
        assert self.pool.num_held + self.pool.num_free == self.pool.num_pages
        assert self.pool.num_held == len({page for pages in self.held for page in pages})


PoolMachine.TestCase.settings = settings(stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase
