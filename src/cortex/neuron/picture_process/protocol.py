"""The protocol between the daemon and the process that decodes pictures."""

from __future__ import annotations

from cortex.ipc.channel import ChannelMessage
from cortex.neuron.vision.picture import PictureGrid
from cortex.neuron.vision.spec import PictureSpec
from cortex.wire.rejection import Rejected


class Decode(ChannelMessage, frozen=True):
    """Asks for the pixels of a picture."""

    spec: PictureSpec
    grid: PictureGrid
    param: str
    """Where the client has the picture, for errors."""
    body: bytes
    """Its file. The last field, so that it can be sent without being copied."""


class Decoded(ChannelMessage, frozen=True):
    pixels: bytes
    """As `vision.preparing.prepare` returns them."""


Reply = Decoded | Rejected
