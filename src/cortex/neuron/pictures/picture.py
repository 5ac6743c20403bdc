"""A picture in a prompt, as plain values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PictureGrid:
    """A picture's size in a prompt. It follows from the size in the file's header: nothing is decoded for it."""

    rows: int
    """Rows of tokens."""
    columns: int
    num_tokens: int
    """Positions in the prompt: `rows` times `columns`, and the tokens that end rows in families that have them. The
    tokens around a picture are text of the prompt, and are counted there."""
    width: int
    """Columns of the prepared pixels."""
    height: int

    @property
    def num_bytes(self) -> int:
        """What the prepared pixels take."""
        return 3 * self.width * self.height

    @property
    def num_features(self) -> int:
        """Positions that a vector of the picture takes."""
        return self.rows * self.columns

    def feature_offsets(self) -> range | tuple[int, ...]:
        """The positions among `num_tokens` that have a vector of the picture, ascending."""
        if self.num_tokens == self.num_features:
            return range(self.num_tokens)
        stride = self.num_tokens // self.rows
        return tuple(row * stride + column for row in range(self.rows) for column in range(self.columns))


@dataclass(frozen=True, slots=True)
class PictureRules:
    """How a model's decoder treats pictures."""

    has_axes: bool = False
    """Whether positions in a picture have three axes (time, row, column), and those after it continue from the longer
    side of the picture."""
    is_whole: bool = False
    """Whether the positions of a picture attend to each other, so that all of them are computed in one step."""


@dataclass(frozen=True, slots=True)
class PicturePlace:
    """Where a picture stands in a tokenised prompt."""

    number: int
    """Which picture of its request it is."""
    at: int
    """The first of its positions."""
    grid: PictureGrid


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a request for the engine."""

    at: int
    """The first of its positions in the prompt."""
    grid: PictureGrid
    key: bytes
    """`content_key`: pictures of equal keys have equal vectors, and are of one tenant."""
    pixels: bytes
    """As `prepare` returns them: [height, width, 3] of uint8."""

    @property
    def end(self) -> int:
        return self.at + self.grid.num_tokens


def content_key(file: bytes, grid: PictureGrid, preprocessing: bytes, tenant: bytes = b"") -> bytes:
    """The name of a picture's content: its file, the size it is brought to, and the rest of the preprocessing
    (`PictureSpec.digest`). The same file under other preprocessing is another picture. So is the same file of another
    tenant, who must not learn from the time it takes that somebody has sent it."""
    sizes = f"{grid.rows}x{grid.columns},{grid.width}x{grid.height},{grid.num_tokens};".encode()
    return hashlib.blake2b(sizes + preprocessing + file, digest_size=16, key=tenant).digest()
