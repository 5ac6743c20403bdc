"""The KV pages of a model, in groups: the layers of a group attend to the same positions and share page ids.

Layers without a window are one group. Layers with a sliding window need only the latest positions of a sequence, so
each window has a group with a page pool of its own, and a sequence releases the pages behind the window as it advances.
They stay known until they are used again. So a sequence can continue after a prefix if all of its pages are known in
the group without a window, and those of its last positions in a group with one.

Pure bookkeeping, like `pages.PagePool`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from cortex.neuron.engine.kv.pages import Digest, PagePool

Window = int | None
"""Positions that a token attends to, including its own; None: all."""
TailPages = tuple[int, ...]
"""The page of each group in which a tail ends."""
AddedPages = tuple[int, int, tuple[int, ...]]
"""(group, index of the first in the row's page table, pages)"""


def window_pages(window: int, page_tokens: int) -> int:
    """The most pages that `window` consecutive positions can span."""
    return (window + page_tokens - 2) // page_tokens + 1


@dataclass(slots=True, eq=False)
class HeldPages:
    """The pages of one group that a sequence holds: consecutive ones of its page table, from index `first` on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


@dataclass(slots=True, eq=False)
class IncomingPages:
    """Pages of one group that are being copied from host memory, and those of the same prefix on the device. All are
    held until the copy is complete."""

    group: int
    pages: list[int] = field(default_factory=list)
    """In the order of the prefix."""
    new_pages: list[int] = field(default_factory=list)
    new_digests: list[Digest] = field(default_factory=list)


Holding = tuple[HeldPages, ...]
"""A sequence's pages in each group; empty while it has no row."""


class PageGroup:
    """The pages of the layers with one window."""

    def __init__(self, pool: PagePool, window: Window) -> None:
        self.pool = pool
        self.window = window

    def first_needed(self, position: int) -> int:
        """The index of the first page that a token at `position` attends to."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // self.pool.page_tokens

    def most_held(self, length: int) -> int:
        """The most pages that a sequence holds until it has `length` positions, if it advances token by token."""
        count = -(-length // self.pool.page_tokens)
        return count if self.window is None else min(count, window_pages(self.window, self.pool.page_tokens))

    def first_of_prefix(self, count: int) -> int:
        """The index of the first page that is needed to continue after `count` pages, or to compute the last token of
        them again."""
        return self.first_needed(count * self.pool.page_tokens - 1)

    def cached(self, digests: Sequence[Digest], count: int, start: int) -> list[int]:
        """The pages with which a sequence can continue after `count` known ones, with the token at `start`."""
        return self.pool.match(digests[self.first_needed(start) : count])


class KVPages:
    """Owns the pages of one model. Belongs to the engine thread."""

    def __init__(self, num_pages: Mapping[Window, int], page_tokens: int) -> None:
        """`num_pages`: of each group, including its padding page. The first group is the one that is reported."""
        self.page_tokens = page_tokens
        self.groups = tuple(PageGroup(PagePool(count, page_tokens), window) for window, count in num_pages.items())
        self._windowed = tuple((index, group) for index, group in enumerate(self.groups) if group.window is not None)

    @property
    def has_windows(self) -> bool:
        return bool(self._windowed)

    # -- prefixes --------------------------------------------------------------------------------------------------

    def match(self, digests: Sequence[Digest], elsewhere: Callable[[int, Digest], bool] | None = None) -> Sequence[int]:
        """The numbers of leading pages after which a sequence with these `digests` can continue, ascending from 0.
        Takes no reference: call `hold` before anything else. `elsewhere`: whether a page of a group is available
        elsewhere."""

        def is_known(index: int, digest: Digest) -> bool:
            return self.groups[index].pool.knows(digest) or (elsewhere is not None and elsewhere(index, digest))

        counts: Sequence[int] = range(len(digests) + 1)
        for index, group in enumerate(self.groups):
            if group.window is None:
                known: Sequence[object]
                if elsewhere is None:
                    known = group.pool.match(digests)
                else:
                    known = list(takewhile(partial(is_known, index), digests))
                counts = range(len(known) + 1)
        for index, group in self._windowed:
            known_from = [0]  # for each number of pages: where the run of known pages that ends there begins
            for page in range(counts[-1]):
                known_from.append(known_from[-1] if is_known(index, digests[page]) else page + 1)
            counts = [count for count in counts if known_from[count] <= group.first_of_prefix(count)]
        return counts

    def hold(self, digests: Sequence[Digest], count: int, start: int) -> Holding:
        """Takes references on the pages with which a sequence continues after `count` pages that `match` returned, with
        the token at `start`: the one after them, or the last of them."""
        holding = []
        for group in self.groups:
            pages, first = group.cached(digests, count, start), group.first_needed(start)
            assert len(pages) == count - first, "a page that the sequence continues with is not known any more"
            group.pool.hold(pages)
            holding.append(HeldPages(first, pages))
        return tuple(holding)

    def commit(self, holding: Holding, index: int, digest: Digest) -> None:
        """Records that the pages at `index` of a sequence now contain the prefix `digest`."""
        for group, held in zip(self.groups, holding, strict=True):
            if held.first <= index:  # else it was released before its tokens were known
                group.pool.commit(held.pages[index - held.first], digest)

    def commit_tail(self, holding: Holding, index: int, digest: Digest) -> None:
        """Records that the tail `digest` ends inside the pages at `index` of a sequence."""
        for group, held in zip(self.groups, holding, strict=True):
            group.pool.commit_tail(held.pages[index - held.first], digest)

    def hold_tail(self, digest: Digest) -> TailPages | None:
        """Takes references on the pages in which a tail ends; None if they are not known. Release them with
        `release_tail` once the step that copies them is planned."""
        pages = []
        for group in self.groups:
            page = group.pool.tail_page(digest)
            if page is None:
                return None
            pages.append(page)
        for group, page in zip(self.groups, pages, strict=True):
            group.pool.hold((page,))
        return tuple(pages)

    def release_tail(self, pages: TailPages) -> None:
        for group, page in zip(self.groups, pages, strict=True):
            group.pool.release((page,))

    def expect(
        self, digests: Sequence[Digest], count: int, start: int, first: int = 0
    ) -> Sequence[IncomingPages] | None:
        """Holds what a sequence needs to continue after `count` pages, as in `hold`, with new pages for those that are
        not known, whose contents the caller provides. Without the pages before `first`, which the sequence computes
        meanwhile; 0 with windows, because the pages from which it would compute them may be evicted. None, without any
        change, if too few pages are free."""
        assert not (first and self.has_windows), "with windows, a sequence waits for all of its prefix"
        prefixes = [digests[group.first_needed(start) : count] for group in self.groups]
        found = [list(map(group.pool.page_of, wanted)) for group, wanted in zip(self.groups, prefixes, strict=True)]
        for group, places in zip(self.groups, found, strict=True):
            known = [page for page in places if page is not None]
            if places[first:].count(None) + group.pool.num_idle_among(known) > group.pool.num_free:
                return None
        incoming = []
        for index, (group, wanted, places) in enumerate(zip(self.groups, prefixes, found, strict=True)):
            group.pool.hold(page for page in places if page is not None)
            lacking = [digest for digest, page in zip(wanted[first:], places[first:], strict=True) if page is None]
            new = group.pool.allocate(len(lacking)) or []
            unused = iter(new)
            pages = [next(unused) if page is None else page for page in places[first:]]
            incoming.append(IncomingPages(index, pages, new, lacking))
            group.pool.release([page for page in places[:first] if page is not None])  # they were not to be evicted
        return incoming

    def arrived(self, incoming: Sequence[IncomingPages]) -> None:
        """The contents of the new pages are complete: they are known from now on, and idle."""
        for each in incoming:
            pool = self.groups[each.group].pool
            for page, digest in zip(each.new_pages, each.new_digests, strict=True):
                pool.commit(page, digest)
        self.gave_up(incoming)

    def gave_up(self, incoming: Sequence[IncomingPages]) -> None:
        """Releases what `expect` held; new pages stay unknown, and nothing may write to them any longer."""
        for each in incoming:
            self.groups[each.group].pool.release(each.pages)

    def digests(self) -> set[Digest]:
        """Those of all known prefixes and tails."""
        return {digest for group in self.groups for digest in group.pool.digests()}

    def disown(self, digests: Iterable[Digest]) -> None:
        """Forgets the pages of these prefixes."""
        digests = list(digests)
        for group in self.groups:
            group.pool.disown(digests)

    # -- growth ----------------------------------------------------------------------------------------------------

    def lacking(self, holding: Holding, length: int) -> list[int]:
        """The pages of each group that a sequence needs in addition to those that it holds, until it has `length`
        positions."""
        return [
            max(0, group.most_held(length) - len(held.pages)) for group, held in zip(self.groups, holding, strict=True)
        ]

    def fits(self, digests: Sequence[Digest], count: int, start: int, length: int, reserved: Sequence[int]) -> bool:
        """Whether a sequence that continues after `count` known pages, as in `hold`, can grow to `length` positions and
        leave `reserved` pages of each group free."""
        for group, num_reserved in zip(self.groups, reserved, strict=True):
            cached = group.cached(digests, count, start)
            needed = group.most_held(length) - len(cached) + group.pool.num_idle_among(cached)
            if needed + num_reserved > group.pool.num_free:
                return False
        return True

    def reach(self, holding: Holding, length: int, *, takes_pages: bool) -> int:
        """How far towards `length` a sequence can grow with the free pages. `takes_pages`: it may take pages from other
        sequences, except the scarce pages of windows: a long chunk is computed in parts instead."""
        for index, group in self._windowed if takes_pages else enumerate(self.groups):
            length = min(length, (holding[index].end + group.pool.num_free) * self.page_tokens)
        return length

    def extend(self, holding: Holding, length: int) -> Sequence[AddedPages] | None:
        """Adds the pages that a sequence lacks to hold `length` positions; None, without any change, if too few are
        free."""
        end = holding[0].end  # in every group
        count = -(-length // self.page_tokens) - end
        if count <= 0:
            return ()
        if any(count > group.pool.num_free for group in self.groups):
            return None
        added = []
        for index, (group, held) in enumerate(zip(self.groups, holding, strict=True)):
            pages = group.pool.allocate(count) or ()
            held.pages.extend(pages)
            added.append((index, end, tuple(pages)))
        return added

    def trim(self, holding: Holding, position: int) -> None:
        """Releases the pages behind the windows of a sequence whose next token has this position."""
        for index, group in self._windowed:
            held = holding[index]
            count = group.first_needed(position) - held.first
            if count > 0:
                group.pool.release(held.pages[:count])
                del held.pages[:count]
                held.first += count

    def release(self, holding: Holding) -> None:
        """Releases everything that a sequence holds."""
        for group, held in zip(self.groups, holding, strict=True):
            group.pool.release(held.pages)

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """The pages of the first group that can be allocated."""
        return self.groups[0].pool.num_pages

    @property
    def num_held(self) -> int:
        """The held pages of the fullest group, in proportion to `num_pages`."""
        pools = [group.pool for group in self.groups]
        return max(-(-pool.num_held * self.num_pages // pool.num_pages) for pool in pools)

    @property
    def num_idle(self) -> int:
        """The idle pages of the first group."""
        return self.groups[0].pool.num_idle

    def check_integrity(self, holdings: Sequence[Holding], incoming: Sequence[IncomingPages] = ()) -> None:
        """Raises AssertionError unless the reference counts match what `holdings` and `incoming` say."""
        for index, group in enumerate(self.groups):
            expected = [each.pages for each in incoming if each.group == index]
            group.pool.check_integrity([*expected, *(holding[index].pages for holding in holdings)])
        for holding in holdings:
            assert len({held.end for held in holding}) == 1, "the groups of a sequence end at different pages"
