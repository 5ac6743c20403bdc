"""An error that another process of the same host replies with."""

from __future__ import annotations

from typing import Any

import msgspec

from cortex.wire.error_encoding import BY_CODE
from cortex.wire.errors import CortexError


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The CortexError of this code. Encoded by position: both sides are always the same version."""

    code: str
    message: str
    param: str | None
    details: dict[str, Any]


def rejected(error: CortexError) -> Rejected:
    return Rejected(error.code, error.message, error.param, error.details)


def error_of(reply: Rejected) -> CortexError:
    return BY_CODE.get(reply.code, CortexError)(reply.message, param=reply.param, details=reply.details)
