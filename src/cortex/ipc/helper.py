"""A helper process: a table of functions that run outside of the program, with limits. Both sides import this module.

A helper is a module with a function `functions`, which returns the table. The process (`helper_process`) imports the
module, makes the table once, and forks workers that run the calls. The program calls the functions through a
`HelperPool` on a loop, or a `HelperOfThread`. A function takes values that msgspec can encode; its annotations say
which. What is large comes last, as the parameter `body`: it is sent without being copied.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from cortex.ipc.channel import ChannelMessage
from cortex.wire.error_encoding import BY_CODE
from cortex.wire.errors import CortexError

T = TypeVar("T")


class Helper(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a helper, for the program that starts it."""

    name: str
    """The name of its processes, for `top`: at most 15 characters."""
    purpose: str
    """Its description in the log and in errors, such as "the process that decodes pictures"."""
    module: str
    """Its `functions` is called with `arguments`, before workers are forked, which share what it has read."""
    arguments: tuple[str | None, ...] = ()
    memory_bytes: int | None = None
    """Memory limit of `functions`, and of each worker beyond the shared memory. Exceeding it raises MemoryError, which
    ends the process."""
    start_cpu_s: int | None = None
    """How long `functions` may compute."""
    cpu_s: int | None = None
    """How long a call may compute before its worker is ended."""
    environment: dict[str, str] = {}


class FunctionCall(ChannelMessage, frozen=True):
    function: str
    arguments: bytes
    """Encoded separately, because only the function knows their types."""
    body: bytes
    """The last field, so that it can be sent without being copied."""


class Returned(ChannelMessage, Generic[T], frozen=True):
    value: T


class Function(Generic[T]):
    """A function of a helper as the program sees it: its name, and the type that it returns."""

    def __init__(self, name: str, returns: Any) -> None:
        """`returns` is the type `T` itself, which type checkers do not accept as `type[T]` for unions."""
        self.name = name
        self.reply_type: Any = Returned[returns] | Rejected

    def call(self, *arguments: Any) -> FunctionCall:
        """Raises ValueError or OverflowError for arguments that cannot be encoded."""
        return FunctionCall(self.name, msgspec.msgpack.encode(arguments), b"")


@cache
def function_of(function: Callable[..., T]) -> Function[T]:
    """The description of a function that the program can import, too."""
    return Function(function.__name__, typing.get_type_hints(function)["return"])


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
