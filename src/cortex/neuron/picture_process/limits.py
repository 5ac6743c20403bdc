"""The limits on the pictures of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from cortex.settings.section import Section
from cortex.wire.node.load_options import Count
from cortex.wire.pictures.files import MAX_PICTURES
from cortex.wire.pictures.parts import invalid
from cortex.wire.requests import PicturePart


class PictureLimits(Section, frozen=True):
    """Pictures in requests. Their size is known from the headers of their files, before anything is decoded. Decoding
    runs in processes of its own, which are killed when they exceed a limit."""

    max_pictures: Annotated[int, Meta(ge=0, le=MAX_PICTURES)] = 100
    """In one request; more are rejected with 400. 0: no pictures."""
    max_mb: Count = 20
    """Files of more million bytes are rejected with 400."""
    max_megapixels: Count = 50
    """Pictures of more million pixels are rejected with 400."""
    max_aspect: Count = 200
    """So are those whose longer side is more than this many times the shorter one."""
    max_scans: Count = 32
    """Progressive JPEGs with more scans are rejected with 400: each takes as long as a baseline picture, and cameras
    and editors write about ten."""
    workers: Count = 3
    """Pictures that are decoded at once. One of these places is always left for other clients."""
    timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    """A picture that takes longer to decode is rejected with 400."""
    request_s: Annotated[float, Meta(gt=0)] = 60.0
    """Computing time for all pictures of one request; once it is used up, the others are rejected with 400."""
    memory_mb: Count = 1024
    """Memory that decoding one picture may take."""
    cache_mb: Annotated[int, Meta(ge=0)] = 256
    """Memory for decoded pictures: a conversation sends them again with each turn."""

    def check(self, pictures: Sequence[PicturePart]) -> None:
        """Raises InvalidValue, which names the first picture that exceeds a limit."""
        if len(pictures) > self.max_pictures:
            raise invalid(
                pictures[self.max_pictures].param,
                f"the request has {len(pictures)} pictures, at most {self.max_pictures} are allowed on this node "
                "(pictures.max_pictures in neuron.toml); send fewer",
            )
        for picture in pictures:
            if (problem := self._problem(picture)) is not None:
                raise invalid(picture.param, problem)

    def _problem(self, picture: PicturePart) -> str | None:
        longer, shorter = max(picture.width, picture.height), min(picture.width, picture.height)
        size = f"the picture has {picture.width} × {picture.height} pixels"
        if picture.num_bytes > self.max_mb * 1_000_000:
            size = f"the picture has {picture.num_bytes / 1e6:.1f} MB"
            return f"{size}, at most {self.max_mb} are allowed (pictures.max_mb); compress it"
        if picture.width * picture.height > self.max_megapixels * 1_000_000:
            return f"{size}, at most {self.max_megapixels} million are allowed (pictures.max_megapixels); shrink it"
        if longer > self.max_aspect * shorter:
            return (
                f"{size}, and no side may be more than {self.max_aspect} times as long as the other "
                "(pictures.max_aspect); crop it"
            )
        return None
