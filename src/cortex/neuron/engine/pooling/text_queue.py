"""Which texts are computed next: those of all requests in turn, as many as fit in a batch. Pure; imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class QueuedText(NamedTuple):
    request_id: str
    number: int
    """Its place among the texts of its request."""
    num_tokens: int


class TextQueue:
    """Requests take turns, so that a request with thousands of texts does not delay one with a single text."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[QueuedText]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def num_requests(self) -> int:
        return len(self._waiting)

    def add(self, request_id: str, lengths: Sequence[int]) -> None:
        texts = (QueuedText(request_id, index, num_tokens) for index, num_tokens in enumerate(lengths))
        self._waiting[request_id] = deque(texts)

    def remove(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def take(self, max_tokens: int, only: str | None = None) -> list[QueuedText]:
        """The next texts with at most `max_tokens` together, or a single longer one; `only`: of that request."""
        taken: list[QueuedText] = []
        free_tokens = max_tokens
        while (name := self._next(only)) is not None:
            texts = self._waiting.pop(name)
            if taken and texts[0].num_tokens > free_tokens:
                self._waiting = {name: texts, **self._waiting}  # the next batch begins with it
                return taken
            taken.append(texts.popleft())
            free_tokens -= taken[-1].num_tokens
            if texts:
                self._waiting[name] = texts  # behind all others
        return taken

    def put_back(self, texts: Iterable[QueuedText]) -> None:
        """Texts that were taken and not computed: they are the next of their requests again."""
        for text in reversed(list(texts)):
            self._waiting.setdefault(text.request_id, deque()).appendleft(text)

    def _next(self, only: str | None) -> str | None:
        if only is None:
            return next(iter(self._waiting), None)
        return only if only in self._waiting else None
