"""Work of a node that is followed to its end by polls: a download, a measurement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, Literal, Protocol, TypeVar

from cortex.http.upstream.faults import UpstreamFault
from cortex.wire.error_encoding import from_code
from cortex.wire.errors import CortexError, LoadFailed, ModelNotFound, UpstreamUnavailable

POLL_S = 0.5
MAX_MISSED_POLLS = 60
"""The node may restart or be busy for this many polls before the work counts as failed."""


class WorkStatus(Protocol):
    """What a node reports about the work."""

    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def code(self) -> str | None: ...


StatusT = TypeVar("StatusT", bound=WorkStatus)


class Following(Generic[StatusT]):
    """One piece of work on one node. Owned by the task that runs `outcome`."""

    def __init__(
        self,
        start: Callable[[], Awaitable[StatusT]],
        poll: Callable[[], Awaitable[StatusT]],
        cancel: Callable[[], Awaitable[StatusT]],
        *,
        described: str,
        after_restart: str,
    ) -> None:
        """`described`: what the work is, as in "the download on beast". `after_restart`: what to say when the node does
        not know the work any more."""
        self.status: StatusT | None = None
        self.cancelled = asyncio.Event()
        """Setting it ends the work soon."""
        self._start, self._poll, self._cancel = start, poll, cancel
        self._described = described
        self._after_restart = after_restart

    async def outcome(self) -> CortexError | None:
        """Why the work failed; None when it is done."""
        try:
            return await self._outcome()
        except UpstreamFault as fault:
            return UpstreamUnavailable(str(fault))
        except CortexError as error:
            return error

    async def _outcome(self) -> CortexError | None:
        status = self.status = await self._start()
        num_missed = 0
        is_cancelling = False
        while status.state == "running":
            if is_cancelling:
                await asyncio.sleep(POLL_S)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self.cancelled.wait()
            is_cancelling = self.cancelled.is_set()
            try:
                status = self.status = await (self._cancel() if is_cancelling else self._poll())
                num_missed = 0
            except ModelNotFound:
                return LoadFailed(self._after_restart)
            except (UpstreamFault, CortexError):
                num_missed += 1
                if num_missed >= MAX_MISSED_POLLS:
                    raise
        if status.state == "done":
            return None
        return from_code(status.code or LoadFailed.code, status.reason or f"{self._described} was {status.state}")
