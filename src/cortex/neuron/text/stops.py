"""Finds stop strings in a stream. Text that may be the beginning of one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Finds the stop string that is completed first. Owned by one response. The result does not depend on the split.

    Of two stops that end at the same character, the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted((stop for stop in set(stops) if stop), key=len, reverse=True))
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown, and the stop string once it is found; after that, the text is empty."""
        if self._hit is not None:
            return "", self._hit
        if not self._stops:
            return text, None
        text = self._held + text
        first_end = len(text) + 1
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and start + len(stop) < first_end:
                first_end, self._hit = start + len(stop), stop
        if self._hit is not None:
            self._held = ""
            return text[: first_end - len(self._hit)], self._hit
        keep = max(held_suffix(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The held-back text, when the response ends without a stop string."""
        held, self._held = self._held, ""
        return held


def held_suffix(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that could be the beginning of `marker`."""
    start = text.find(marker[:1], max(0, len(text) - len(marker) + 1))
    while start >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start = text.find(marker[:1], start + 1)
    return 0
