"""KV pages: tracks which sequences hold them and which contain a reusable prefix.

Pure bookkeeping over page ids; the memory itself belongs to `memory.sequences.KVCache`. A page is in one of three
states: held (reference count > 0), idle (not held, but it contains a known prefix) or blank. Allocation takes blank
pages first, then the least recently used idle ones.

The digest of a full page covers the tenant and all tokens up to and including that page, so equal digests mean equal
prefixes of one tenant. It begins like the tenant, so that an operator can delete what is kept of one.

A page that is not full, or was not when a prompt ended in it, can also be known by the digest of a tail: a prefix that
ends inside the page. Such a page is copied rather than shared, because every sequence continues it differently.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import cast

Digest = bytes
ROOT: Digest = bytes(16)
"""The parent digest of a prompt's first page without a tenant. With a tenant the parent is the tenant, so that its
digests, and those of all pages after it, never match other tenants'."""
TENANT_BYTES = 8
"""The first bytes of a digest are those of its tenant."""
PADDING_PAGE = 0
"""Never allocated, because padding rows of captured graphs read and write here."""
_BLOCK_PAGES = 32
_NUM_BLOCKS = 2048
"""Number of blocks of pages whose digests are cached, because conversations resend the same beginning."""


def page_digests(parent: Digest, tokens: Sequence[int], page_tokens: int, salts: Sequence[bytes] = ()) -> list[Digest]:
    """The digest of each full page of `tokens`; `parent` is the digest of the page before the first. `salts`: other
    contents of each page, such as pictures; empty for none."""
    data = array("I", tokens).tobytes()
    width = page_tokens * 4
    digests: list[Digest] = []
    block = 0 if salts else _BLOCK_PAGES * width
    while block and len(data) - len(digests) * width >= block:
        start = len(digests) * width
        digests += _block_digests(digests[-1] if digests else parent, data[start : start + block], width)
    rest = memoryview(data)[len(digests) * width :]
    return digests + _chain(digests[-1] if digests else parent, rest, width, salts)


@lru_cache(maxsize=_NUM_BLOCKS)
def _block_digests(parent: Digest, data: bytes, width: int) -> list[Digest]:
    """The caller must not change them."""
    return _chain(parent, data, width)


def tail_digest(parent: Digest, tokens: Sequence[int], salt: bytes = b"") -> Digest:
    """The digest of a prefix that ends inside a page, whose first `tokens` it has; `parent` and `salt` as above."""
    data = b"".join((parent, array("I", tokens).tobytes(), salt))
    return parent[:TENANT_BYTES] + hashlib.blake2b(data, digest_size=16, person=b"tail").digest()


def forget_tokens() -> None:
    """Drops the tokens of remembered blocks."""
    _block_digests.cache_clear()


def _chain(parent: Digest, data: bytes | memoryview, width: int, salts: Sequence[bytes] = ()) -> list[Digest]:
    """The digests of pages of `width` bytes, each of the page and of all before it."""
    digests = []
    for index, start in enumerate(range(0, len(data) - width + 1, width)):
        page = b"".join((parent, data[start : start + width], salts[index] if salts else b""))
        parent = parent[:TENANT_BYTES] + hashlib.blake2b(page, digest_size=16).digest()
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
        self._tail_of: dict[int, Digest] = {}
        self._page_of_tail: dict[Digest, int] = {}

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
        found = list(map(self._page_of.get, digests))
        end = found.index(None) if None in found else len(found)
        return cast("list[int]", found[:end])

    def knows(self, digest: Digest) -> bool:
        return digest in self._page_of

    def page_of(self, digest: Digest) -> int | None:
        return self._page_of.get(digest)

    def idle(self) -> Iterator[tuple[int, Digest]]:
        """The idle pages that are full, with their digests, the least recently used first."""
        return ((page, self._digest_of[page]) for page in self._idle if page in self._digest_of)

    def digests(self) -> list[Digest]:
        """Those of all known prefixes and tails."""
        return [*self._page_of, *self._page_of_tail]

    def tail_page(self, digest: Digest) -> int | None:
        """The page in which the tail `digest` ends. It takes no reference, as `match`."""
        return self._page_of_tail.get(digest)

    def hold(self, pages: Iterable[int]) -> None:
        """Takes a reference on pages that `match` or `tail_page` returned."""
        references, idle = self._references, self._idle
        for page in pages:
            if references[page] == 0:
                del idle[page]
            references[page] += 1

    def num_idle_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` would no longer be free once held."""
        return [self._references[page] for page in pages].count(0)

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

    def commit_tail(self, page: int, digest: Digest) -> None:
        """Records that the tail `digest` ends inside a held page. The first page of a tail stays its page."""
        if digest not in self._page_of_tail and page not in self._tail_of:
            self._page_of_tail[digest] = page
            self._tail_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Releases one reference to each. Later pages become idle first, so that a prefix is evicted from its end."""
        references, digest_of, tail_of, idle = self._references, self._digest_of, self._tail_of, self._idle
        for page in reversed(pages):
            references[page] -= 1
            if references[page] == 0:
                if page in digest_of or page in tail_of:
                    idle[page] = None
                else:
                    self._blank.append(page)

    def disown(self, digests: Iterable[Digest]) -> None:
        """Forgets the pages of these prefixes and tails, held or idle."""
        for digest in digests:
            page = self._page_of.get(digest, self._page_of_tail.get(digest))
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
        tail = self._tail_of.pop(page, None)
        if tail is not None:
            del self._page_of_tail[tail]

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
        named = {*self._digest_of, *self._tail_of}
        assert idle <= named, "an idle page has no digest"
        assert not blank & named, "a blank page has a digest"
        assert {page: tail for tail, page in self._page_of_tail.items()} == self._tail_of, "tail maps disagree"
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of, "digest maps disagree"
