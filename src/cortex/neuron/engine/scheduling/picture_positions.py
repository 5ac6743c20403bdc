"""The places of a sequence's pictures: in its rows, in its page digests, and on the axes of its rotation. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from cortex.neuron.pictures.picture import Picture, PictureGrid, PictureRules


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """The positions of a picture that a row computes."""

    offset: int
    """Index of the first of them in the row."""
    count: int
    first: int
    """Index of the first of them in the picture."""
    key: bytes
    grid: PictureGrid
    rope: int
    """The rotation's position of the picture's beginning."""
    lag: int
    """By how much the rotation lags behind positions after the picture."""


class PicturePositions:
    """The pictures of one prompt. Immutable."""

    def __init__(self, pictures: Sequence[Picture], rules: PictureRules) -> None:
        self._pictures = pictures
        self._rules = rules
        self._starts = [picture.at for picture in pictures]
        self._lags = [0]
        """The lag before the first picture, and after each."""
        for picture in pictures:
            grid = picture.grid
            gained = grid.num_tokens - max(grid.rows, grid.columns) if rules.has_axes else 0
            self._lags.append(self._lags[-1] + gained)

    def lag(self, position: int) -> int:
        """By how much the rotation lags at a position; inside a picture, as before the picture."""
        index = bisect_right(self._starts, position)
        inside = index > 0 and position < self._pictures[index - 1].end
        return self._lags[index - 1 if inside else index]

    def spans(self, start: int, end: int) -> tuple[PictureSpan, ...]:
        """The parts of pictures between two positions."""
        found = []
        first = max(0, bisect_right(self._starts, start) - 1)
        for index in range(first, len(self._pictures)):
            picture = self._pictures[index]
            if picture.at >= end:
                break
            begin, stop = max(start, picture.at), min(end, picture.end)
            if begin < stop:
                rope, lag = picture.at - self._lags[index], self._lags[index + 1]
                size = (begin - start, stop - begin, begin - picture.at)
                found.append(PictureSpan(*size, picture.key, picture.grid, rope, lag))
        return tuple(found)

    def cut(self, start: int, end: int) -> int:
        """The end of a chunk from `start` that should end at `end`: no picture is divided that must be whole."""
        if not self._rules.is_whole:
            return end
        index = bisect_right(self._starts, end - 1) - 1
        if index < 0 or end >= self._pictures[index].end or end <= self._pictures[index].at:
            return end
        picture = self._pictures[index]
        return picture.at if picture.at > start else picture.end

    def salt(self, start: int, end: int) -> bytes:
        """Distinguishes a page with these positions from others with the same tokens."""
        return b"".join(span.key + span.first.to_bytes(4, "little") for span in self.spans(start, end))


NO_PICTURES = PicturePositions((), PictureRules())
