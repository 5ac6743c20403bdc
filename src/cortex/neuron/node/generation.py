"""One request's answer as it comes: an async iterator of the batches of `StepOutput` that have gathered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cortex.neuron.engine.request import StepOutput
from cortex.wire.errors import CortexError


class Generation:
    """Read by one task. Ends by StopAsyncIteration after the output with `finish`, or by raising a CortexError.

    `cancel` may be called at any time and any number of times; whoever cancels need not read on, nothing
    stays behind. Outputs that nobody has read yet are kept: their number is bounded by the request's `max_tokens`.
    """

    def __init__(self, request_id: str, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._unread: list[StepOutput] = []
        self._error: CortexError | None = None
        self._ended = False
        self._changed: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the last output or the error has arrived, read or not."""
        return self._ended

    def cancel(self) -> None:
        """Ends the request wherever it is: queued, in its prompt, or producing."""
        if not self._ended:
            self._on_cancel()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[StepOutput]:
        while not self._unread:
            if self._error is not None:
                raise self._error.with_traceback(None)  # shared by all that ended with it
            if self._ended:
                raise StopAsyncIteration
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        batch, self._unread = self._unread, []
        return batch

    # Called by the model's instance

    def push(self, output: StepOutput) -> None:
        if self._ended:
            return
        self._unread.append(output)
        self._ended = output.finish is not None
        self._wake()

    def fail(self, error: CortexError) -> None:
        """Ends it with `error`, which the reader gets after what is unread."""
        if self._ended:
            return
        self._error, self._ended = error, True
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
