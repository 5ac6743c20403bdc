"""A helper whose functions do what a test asks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from cortex.wire.errors import InvalidValue


class Done(NamedTuple):
    process_id: int
    number: int
    num_bytes: int = 0


def functions(prefix: str = "") -> dict[str, Callable[..., Any]]:
    def name() -> bytes:
        return os.fsencode(f"{prefix}helper")

    return {each.__name__: each for each in (do, name)}


def do(kind: str, number: int, body: bytes) -> Done:
    match kind:
        case "never":
            while True:
                time.sleep(3600)
        case "crash":
            os.abort()
        case "allocate":
            bytearray(number)
        case "reject":
            raise InvalidValue("no such thing", param="x")
        case "fail":
            raise ZeroDivisionError
    return Done(os.getpid(), number, len(body))
