"""One request's outputs as an async iterator of batches of `StepOutput`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cortex.neuron.engine.request import StepOutput
from cortex.wire.errors import CortexError


class Generation:
    """Read by one task. Ends with StopAsyncIteration after the output with `finish`, or by raising a CortexError.

    A batch is everything produced since the last read. Unread outputs are kept; `max_tokens` bounds their number.
    """

    def __init__(self, request_id: str, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._unread: list[StepOutput] = []
        self._error: CortexError | None = None
        self._ended = False
        self._changed: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """Ends the request in any phase. May be called at any time and repeatedly; reading on is optional."""
        if not self._ended:
            self._on_cancel()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[StepOutput]:
        while not self._unread:
            if self._error is not None:
                raise self._error.with_traceback(None)  # several generations may share one error
            if self._ended:
                raise StopAsyncIteration
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        batch, self._unread = self._unread, []
        return batch

    # For the instance

    def push(self, output: StepOutput) -> None:
        if self._ended:
            return
        self._unread.append(output)
        self._ended = output.finish is not None
        self._wake_reader()

    def fail(self, error: CortexError) -> None:
        """Ends the generation: the reader gets the unread outputs, then `error`."""
        if self._ended:
            return
        self._error, self._ended = error, True
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
