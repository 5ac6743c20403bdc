"""KV pages: which sequences hold them, and which contain a prefix that a later request can reuse.

Pure bookkeeping over page ids; the memory itself belongs to `memory.sequences.KVCache`. A page is in one of three
states: held (reference count > 0), idle (not held, but it contains a known prefix) or blank. Allocation takes blank
pages first, then the least recently used idle ones.

The digest of a full page covers all tokens up to and including that page, so equal digests mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

Digest = bytes
ROOT: Digest = b""
PADDING_PAGE = 0
"""Never allocated: padding rows of a captured graph read and write here."""


def page_digests(parent: Digest, tokens: Sequence[int], page_tokens: int, salts: Sequence[bytes] = ()) -> list[Digest]:
    """The digest of each full page of `tokens`; `parent` is the digest of the page before the first. `salts`: what
    each page holds besides its tokens; empty: nothing."""
    data = array("I", tokens).tobytes()
    width = page_tokens * 4
    digests = []
    for index, start in enumerate(range(0, len(data) - width + 1, width)):
        salt = salts[index] if salts else b""
        parent = hashlib.blake2b(parent + data[start : start + width] + salt, digest_size=16).digest()
        digests.append(parent)
    return digests


class PagePool:
    """Owns the state of every page of one group of layers. Not thread-safe: it belongs to the engine thread."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        if num_pages < 2:
            raise ValueError("a page pool needs the padding page and at least one more")
        self.page_tokens = page_tokens
        self.num_pages = num_pages - 1
        """Pages that can be allocated."""
        self._references = [0] * num_pages
        self._blank: deque[int] = deque(range(1, num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._digest_of: dict[int, Digest] = {}
        self._page_of: dict[Digest, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now: blank ones and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

    def match(self, digests: Iterable[Digest]) -> list[int]:
        """The pages of the longest known prefix. It takes no reference: call `hold` before anything else."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def knows(self, digest: Digest) -> bool:
        return digest in self._page_of

    def page_of(self, digest: Digest) -> int | None:
        return self._page_of.get(digest)

    def idle(self) -> Iterator[tuple[int, Digest]]:
        """The idle pages with their digests, the least recently used first."""
        return ((page, self._digest_of[page]) for page in self._idle)

    def hold(self, pages: Iterable[int]) -> None:
        """Takes a reference on pages that `match` returned."""
        for page in pages:
            if self._references[page] == 0:
                del self._idle[page]
            self._references[page] += 1

    def num_idle_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` would no longer be free once held."""
        return sum(self._references[page] == 0 for page in pages)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with undefined contents, each held once; None, without any change, if too few are free."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.popleft()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def commit(self, page: int, digest: Digest) -> None:
        """Records that a held page now contains the prefix `digest`. The first page of a digest stays its page."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Releases one reference to each. Later pages become idle first, so that a prefix is evicted from its end."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._digest_of:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def disown(self, digests: Iterable[Digest]) -> None:
        """Forgets the pages of these prefixes, held or idle: their contents cannot be trusted."""
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                continue
            self._forget(page)
            if self._references[page] == 0:
                del self._idle[page]
                self._blank.append(page)

    def _forget(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the reference counts match the pages in `holders`."""
        expected = [0] * len(self._references)
        for pages in holders:
            for page in pages:
                expected[page] += 1
        assert expected == self._references, "reference counts differ from what sequences hold"
        blank, idle = set(self._blank), set(self._idle)
        assert len(blank) == len(self._blank), "a blank page is listed twice"
        assert not blank & idle, "a page is both blank and idle"
        free = {page for page in range(1, len(expected)) if expected[page] == 0}
        assert blank | idle == free, "a free page is missing or a held page is listed as free"
        assert idle <= set(self._digest_of), "an idle page has no digest"
        assert not blank & set(self._digest_of), "a blank page has a digest"
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of, "digest maps disagree"
