"""What a model makes of a picture: its size in pixels and in tokens, and how it is written in a prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cortex.neuron.vision.picture import PictureGrid

Detail = Literal["auto", "low", "high"]
"""`low`: a quick look, at most about a 512 × 512 picture's worth of tokens; `auto` and `high`: as the model was made
for, and in models with a choice of sizes `high` is the largest."""

MAX_ASPECT = 200
"""The longer side by the shorter: beyond it nothing of a picture can be recognised, and one side would vanish."""
MAX_PICTURE_TOKENS = 4096
"""Also where a model would allow more: the memory of its tower is planned for it."""
LOW_TOKENS = 256

Resample = Literal["bilinear", "bicubic"]
Sizing = Literal["area", "square", "budget", "edge"]


class UnusablePicture(ValueError):
    """The picture cannot be shown to the model. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class PictureText:
    """How a picture is written in a prompt."""

    placeholder: str
    """What the chat template writes for a picture: the text of one token."""
    feature: str
    """The token at each position that has a vector of the picture."""
    before: str = ""
    after: str = ""
    row_end: str = ""
    """The token after each row but the last; empty: rows follow each other."""
    end: str = ""
    """The token after the last row, where rows end with one."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The texts of one token each that stand for a picture."""
        return tuple(text for text in (self.placeholder, self.feature, self.row_end, self.end) if text)

    def written(self, grid: PictureGrid) -> str:
        """The text that takes the place of the placeholder."""
        row = self.feature * grid.columns
        rows = (row + self.row_end) * (grid.rows - 1) + row + self.end
        return f"{self.before}{rows}{self.after}"


@dataclass(frozen=True, slots=True)
class PictureDefaults:
    """What a family's files leave out. Where `patch` and the others are in them, the files decide."""

    sizing: Sizing
    text: PictureText
    most: int
    patch: int = 16
    merge: int = 2
    least: int = 0
    choices: tuple[int, ...] = ()
    resample: Resample = "bicubic"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """How one model takes pictures. A plain value: it crosses channels between processes."""

    sizing: Sizing
    """`area`: the sides keep their ratio, and the pixels are between `least` and `most`. `square`: always `most` pixels
    to a side. `budget`: as many tokens as fit in `most`. `edge`: the longer side has at most `most` pixels."""
    patch: int
    """Pixels to the side of a patch."""
    merge: int
    """Patches to the side of what becomes one token."""
    most: int
    least: int = 0
    choices: tuple[int, ...] = ()
    """With `budget`: those that the model was made for, ascending."""
    resample: Resample = "bicubic"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from each channel in 0…1, which is then divided by `std`; both happen on the device."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    text: PictureText = PictureText("", "")

    @property
    def side(self) -> int:
        """Pixels to the side of one token."""
        return self.patch * self.merge

    @property
    def max_tokens(self) -> int:
        """Vectors that a picture has at most, of any size."""
        most = self.most
        match self.sizing:
            case "area":
                return min(most // self.side**2, MAX_PICTURE_TOKENS)
            case "square" | "edge":
                return (most // self.side + (most % self.side > 0)) ** 2
            case "budget":
                return max((most, *self.choices))

    @property
    def digest(self) -> bytes:
        """A digest of everything that pixels depend on besides a picture's file and size."""
        settings = (self.sizing, self.patch, self.merge, self.resample, self.mean, self.std)
        return hashlib.blake2b(repr(settings).encode(), digest_size=16).digest()

    def grid(self, width: int, height: int, detail: Detail = "auto") -> PictureGrid:
        """The size in the prompt of a picture of `width` × `height` pixels, upright. Raises UnusablePicture."""
        if min(width, height) < 1:
            raise UnusablePicture(f"a picture of {width} × {height} pixels has no content")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise UnusablePicture(
                f"a picture of {width} × {height} pixels is more than {MAX_ASPECT} times as long as wide; cut it"
            )
        columns, rows = _SIZINGS[self.sizing](self, width, height, detail)
        ends = rows if self.text.row_end else 0
        return PictureGrid(rows, columns, rows * columns + ends, columns * self.side, rows * self.side)


def _area(spec: PictureSpec, width: int, height: int, detail: Detail) -> tuple[int, int]:
    side, pixels = spec.side, width * height
    most = min(spec.most, (LOW_TOKENS if detail == "low" else MAX_PICTURE_TOKENS) * side**2)
    least = min(spec.least, most)
    # To the nearest multiple, halves to the even one, as the model was trained with.
    columns, rows = round(width / side), round(height / side)
    if columns * rows * side**2 > most:
        shrink = math.sqrt(pixels / most)
        return max(1, math.floor(width / shrink / side)), max(1, math.floor(height / shrink / side))
    if columns * rows * side**2 < max(least, 1):
        grow = math.sqrt(least / pixels)
        return max(1, math.ceil(width * grow / side)), max(1, math.ceil(height * grow / side))
    return columns, rows


def _square(spec: PictureSpec, _width: int, _height: int, _detail: Detail) -> tuple[int, int]:
    return spec.most // spec.side, spec.most // spec.side


def _budget(spec: PictureSpec, width: int, height: int, detail: Detail) -> tuple[int, int]:
    choices = spec.choices or (spec.most,)
    budget = {"low": choices[0], "auto": spec.most, "high": choices[-1]}[detail]
    factor = math.sqrt(budget * spec.side**2 / (width * height))
    columns, rows = math.floor(factor * width / spec.side), math.floor(factor * height / spec.side)
    if rows == 0:
        return min(width // height, budget), 1
    if columns == 0:
        return 1, min(height // width, budget)
    return columns, rows


def _edge(spec: PictureSpec, width: int, height: int, detail: Detail) -> tuple[int, int]:
    side = spec.side
    most = min(spec.most, math.isqrt(LOW_TOKENS) * side) if detail == "low" else spec.most
    ratio = max(width / most, height / most)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    return max(1, -(-width // side)), max(1, -(-height // side))


_SIZINGS: Mapping[Sizing, Callable[[PictureSpec, int, int, Detail], tuple[int, int]]] = {
    "area": _area,
    "square": _square,
    "budget": _budget,
    "edge": _edge,
}
