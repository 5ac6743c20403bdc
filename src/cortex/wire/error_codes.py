"""Errors by their code, which is what crosses the border between programs."""

from __future__ import annotations

from cortex.wire import errors
from cortex.wire.errors import CortexError

BY_CODE: dict[str, type[CortexError]] = {
    cls.code: cls
    for name, cls in vars(errors).items()
    if not name.startswith("_") and isinstance(cls, type) and issubclass(cls, CortexError)
}


def from_code(code: str, message: str) -> CortexError:
    """The error of a `Failure` event or of another program's envelope; an unknown code is an internal error."""
    return BY_CODE.get(code, CortexError)(message)
