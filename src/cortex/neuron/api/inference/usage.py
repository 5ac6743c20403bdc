"""Reports token usage to the gateway, which bills by it: at the end of a stream, or after a client disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cortex.http.server.server import Response
from cortex.neuron.api import responses
from cortex.neuron.api.calls import ApiCall, Route
from cortex.wire.dialects.dialect import EventEncoder
from cortex.wire.errors import RouteNotFound, shorten
from cortex.wire.events import AnyEvent, Failure, Finish, Usage
from cortex.wire.node import failure_report, usage_report

MAX_RECORDS = 1024
WAIT_S = 5.0
"""The gateway may ask for a request's usage before the request has ended here."""


class MeteredEncoder:
    """A dialect's encoder that appends the usage report, and that of a failure, to the last event. One per response.

    `usage` is read when the last choice has finished, or when the stream fails.
    """

    def __init__(
        self, encoder: EventEncoder, usage: Callable[[], Usage], *, num_choices: int, has_lines: bool = False
    ) -> None:
        """`has_lines`: the events are lines, so that a report must not end as one."""
        self._encoder = encoder
        self._has_lines = has_lines
        self._usage = usage
        self._num_unfinished = num_choices

    def encode(self, event: AnyEvent) -> bytes:
        data = self._encoder.encode(event)
        match event:
            case Finish():
                self._num_unfinished -= 1
                return data if self._num_unfinished else data + self._report()
            case Failure(code=code):
                return data + failure_report.comment(code) + self._report()
            case _:
                return data

    def _report(self) -> bytes:
        report = usage_report.comment(self._usage())
        return report.rstrip(b"\n") if self._has_lines else report


class UsageRecords:
    """The usage of requests whose clients disconnected, by the attempt id of their gateway. Belongs to one loop.

    Each record is returned once. The oldest are dropped beyond `MAX_RECORDS`.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._records: dict[str, Usage] = {}
        self._awaited: dict[str, asyncio.Future[Usage]] = {}

    def routes(self) -> list[Route]:
        return [Route("GET", "/requests/{id:.+}/usage", self.get)]

    def add(self, attempt_id: str, usage: Usage) -> None:
        awaited = self._awaited.get(attempt_id)
        if awaited is not None and not awaited.done():
            awaited.set_result(usage)
            return
        if len(self._records) >= MAX_RECORDS:
            del self._records[next(iter(self._records))]
        self._records[attempt_id] = usage

    async def get(self, call: ApiCall) -> Response:
        attempt_id = call.values["id"]
        usage = self._records.pop(attempt_id, None) or await self._wait_for(attempt_id)
        if usage is None:
            raise RouteNotFound(
                f"No usage is recorded for attempt {shorten(attempt_id)}; only disconnected clients leave a record."
            )
        return responses.json(usage)

    async def _wait_for(self, attempt_id: str) -> Usage | None:
        awaited = self._awaited.setdefault(attempt_id, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(awaited)
        except TimeoutError:
            return None
        finally:
            self._awaited.pop(attempt_id, None)
