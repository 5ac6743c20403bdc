"""The store of blocks in host memory, against a model of it that remembers everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.host_pages import store as stores
from cortex.neuron.engine.host_pages.store import BlockKind, BlockPlace, HostPages

from ....examples import MANY

PAGES, STATES, OTHER = BlockKind(b"a", 0, 10), BlockKind(b"a", 1, 35), BlockKind(b"b", 0, 10)


class CountedMemory:
    """A `SlabMemory` that only counts."""

    def __init__(self) -> None:
        self.slabs: dict[int, int] = {}
        self.is_full = False

    def allocate(self, slab: int, num_bytes: int) -> bool:
        if not self.is_full:
            self.slabs[slab] = num_bytes
        return not self.is_full

    def free(self, slab: int) -> None:
        del self.slabs[slab]


def put(store: HostPages, kind: BlockKind, *digests: bytes) -> list[BlockPlace]:
    places = store.reserve(kind, len(digests))
    for digest, place in zip(digests, places, strict=False):
        store.publish(kind, digest, place)
    return places


def test_block_is_found_only_once_its_copy_is_complete_and_only_by_its_own_kind() -> None:
    store = HostPages(CountedMemory(), 1000)
    (place,) = store.reserve(PAGES, 1)
    assert not store.has(PAGES, b"x")
    store.publish(PAGES, b"x", place)
    assert store.has(PAGES, b"x")
    assert not store.has(OTHER, b"x"), "the weights are others"
    assert not store.has(STATES, b"x")
    assert store.borrow(PAGES, [b"x"]) == [place]
    store.forget(PAGES, [b"x", b"never there"])
    assert not store.has(PAGES, b"x")


def test_least_recently_used_slabs_are_dropped_first_and_never_during_a_copy() -> None:
    store = HostPages(CountedMemory(), 160)  # slabs of one block
    put(store, PAGES, *(bytes([number]) for number in range(16)))
    borrowed = store.borrow(PAGES, [b"\x00", b"\x01"])
    store.end(borrowed[:1])
    put(store, OTHER, *(bytes([number]) for number in range(14)))
    assert store.has(PAGES, b"\x00"), "it was used last"
    assert sum(store.has(PAGES, bytes([number])) for number in range(16)) == 2
    store.shrink(0)
    assert [store.has(PAGES, digest) for digest in (b"\x00", b"\x01")] == [False, True], "a copy reads it"
    store.limit(0)
    assert store.has(PAGES, b"\x01"), "still"
    store.end(borrowed[1:])
    assert (len(store), store.num_bytes, store.reserve(PAGES, 1)) == (0, 0, [])


def test_full_budget_takes_memory_over_instead_of_allocating_it_again() -> None:
    memory = CountedMemory()
    store = HostPages(memory, 160)
    put(store, PAGES, *(bytes([number]) for number in range(16)))
    memory.is_full = True  # as while page-locking more would delay steps
    assert len(put(store, OTHER, b"x", b"y")) == 2
    assert [store.has(PAGES, bytes([number])) for number in range(3)] == [False, False, True], "the oldest have gone"
    assert store.has(OTHER, b"x")
    store.check_integrity()
    assert (store.num_bytes, sum(memory.slabs.values())) == (160, 160)


def test_block_that_is_larger_than_the_budget_or_finds_no_memory_has_no_place() -> None:
    memory = CountedMemory()
    store = HostPages(memory, 30)
    assert store.reserve(STATES, 1) == []
    memory.is_full = True
    assert store.reserve(PAGES, 2) == []
    memory.is_full = False
    assert len(store.reserve(PAGES, 9)) == 3, "no more than the budget, all of it in copies"


DIGESTS = st.binary(min_size=1, max_size=1)
KINDS = st.sampled_from([PAGES, STATES, OTHER])


@MANY
@given(
    budget=st.integers(0, 600),
    steps=st.lists(st.tuples(st.sampled_from(["put", "lose", "use", "forget", "limit"]), KINDS, DIGESTS), max_size=40),
)
def test_places_are_never_shared_and_what_is_found_is_what_was_put(
    budget: int, steps: list[tuple[str, BlockKind, bytes]]
) -> None:
    memory = CountedMemory()
    store = HostPages(memory, budget)
    contents: dict[BlockPlace, tuple[BlockKind, bytes]] = {}
    for step, kind, digest in steps:
        if step in ("put", "lose"):
            for place in store.reserve(kind, 1):
                assert place.slot < max(1, stores.SLAB_BYTES // kind.num_bytes)
                contents[place] = (kind, digest)
                if step == "put":
                    store.publish(kind, digest, place)
                else:
                    store.end([place])
        elif step == "use" and store.has(kind, digest):
            places = store.borrow(kind, [digest])
            assert [contents[place] for place in places] == [(kind, digest)]
            store.end(places)
        elif step == "forget":
            store.forget(kind, [digest])
            assert not store.has(kind, digest)
        elif step == "limit":
            store.limit(digest[0])
        store.check_integrity()
        assert store.num_bytes == sum(memory.slabs.values())
