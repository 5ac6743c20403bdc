"""Jobs: operators' long-running orders. Each can be watched, and most can be cancelled.

A job is followed to its end, whether or not a client watches it. The latest completed jobs are kept.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cortex.gateway.api.parts import ApiRoute, ApiServices
from cortex.gateway.proxy.routes import error_response, json_response
from cortex.http.routing import Route
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.error_encoding import OPENAI
from cortex.wire.errors import CortexError, InvalidValue, RouteNotFound, shorten
from cortex.wire.node.groups import of_node
from cortex.wire.node.protocol import Progress

PATH = "/fleet/jobs"
MAX_ENDED = 100

JobKind = Literal["load", "unload", "pin", "pull", "bench"]
JobState = Literal["running", "done", "failed", "cancelled"]


@dataclass(slots=True, eq=False)
class Job:
    """One order. Mutable; owned by the `JobBoard`."""

    id: str
    kind: JobKind
    model: str
    nodes: tuple[str, ...]
    by: str
    """The name of the operator's key."""
    read_stage: Callable[[], tuple[str, Progress | None]]
    """The current stage, in a word, and its progress."""
    cancel: Callable[[], None] | None = None
    """Cancels the work; None for a job that cannot be cancelled."""
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    state: JobState = "running"
    error: CortexError | None = None
    is_cancelled: bool = False
    """Whether somebody asked to cancel it."""
    results: dict[str, Any] = field(default_factory=dict)
    """Results by node, for kinds that have any."""
    _remaining: set[str] = field(default_factory=set)
    _failures: dict[str, CortexError] = field(default_factory=dict)
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, when the job has ended; now if it has."""
        if self.ended_at is not None:
            listener()
        else:
            self._listeners.append(listener)

    def move(self, nodes: Sequence[str], awaited: Sequence[str]) -> None:
        """Continue on these nodes, and wait for `awaited` instead; ends at once when there are none."""
        self.nodes, self._remaining = tuple(nodes), set(awaited)
        if not awaited:
            self.end(None)

    def node_ended(self, node: str, error: CortexError | None) -> None:
        """The work on one node has ended. The job ends with the last of them, and its error names each that failed."""
        self._remaining.discard(node)
        if error is not None:
            self._failures[node] = error
        if not self._remaining:
            self.end(self._failure())

    def _failure(self) -> CortexError | None:
        first = next(iter(self._failures.values()), None)
        if first is None or len(self.nodes) < 2:
            return first
        return first.in_words("; ".join(of_node(node, error.message) for node, error in self._failures.items()))

    def end(self, error: CortexError | None) -> None:
        """Idempotent."""
        if self.ended_at is not None:
            return
        self.ended_at, self.error = time.time(), error
        self.state = "cancelled" if self.is_cancelled else "done" if error is None else "failed"
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def response(self, status: int = 200) -> Response:
        """What an operator gets for the order: its error, or the job."""
        if self.error is not None:
            return error_response(self.error, OPENAI)
        return json_response({"model": self.model, "nodes": self.nodes, "job": self.as_json()}, status)

    def as_json(self) -> dict[str, Any]:
        stage, progress = self.read_stage() if self.state == "running" else (self.state, None)
        return {
            "id": self.id,
            "kind": self.kind,
            "model": self.model,
            "nodes": self.nodes,
            "node": self.nodes[0] if self.nodes else None,
            "by": self.by,
            "state": self.state,
            "stage": stage,
            "done_bytes": progress.done_bytes if progress is not None else None,
            "total_bytes": progress.total_bytes if progress is not None else None,
            "eta_s": progress.eta_s if progress is not None else None,
            "can_cancel": self.state == "running" and self.cancel is not None,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "results": self.results,
            "error": None if self.error is None else {"code": self.error.code, "message": self.error.message},
        }


class JobBoard:
    """The running jobs and the latest completed ones. Used on the loop's thread only."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._prefix = secrets.token_hex(3)
        self._numbers = itertools.count(1)

    def start(
        self,
        kind: JobKind,
        model: str,
        nodes: Sequence[str],
        *,
        by: str,
        awaited: Sequence[str],
        read_stage: Callable[[], tuple[str, Progress | None]],
        cancel: Callable[[], None] | None = None,
    ) -> Job:
        """A job on `nodes` that ends when each of `awaited` has reported to `Job.node_ended`; at once when none is."""
        job = Job(
            f"job_{self._prefix}{next(self._numbers):04x}",
            kind,
            model,
            tuple(nodes),
            by,
            read_stage,
            cancel,
            _remaining=set(awaited),
        )
        self._jobs[job.id] = job
        ended = [each.id for each in self._jobs.values() if each.ended_at is not None]
        for job_id in ended[:-MAX_ENDED]:
            del self._jobs[job_id]
        if not awaited:
            job.end(None)
        return job

    def failed(self, kind: JobKind, model: str, error: CortexError, *, by: str) -> Job:
        """The job of an order that could not begin."""
        job = self.start(kind, model, (), by=by, awaited=("",), read_stage=lambda: ("", None))
        job.end(error)
        return job

    def find(self, job_id: str) -> Job:
        """Raises RouteNotFound."""
        if job_id not in self._jobs:
            raise RouteNotFound(f"There is no job {shorten(job_id)}; GET {PATH} lists the latest.")
        return self._jobs[job_id]

    def newest_first(self) -> list[Job]:
        return list(reversed(self._jobs.values()))


class JobRoutes:
    """`/fleet/jobs`: list, one, cancel. For operators."""

    def __init__(self, api: ApiServices, board: JobBoard) -> None:
        self._api = api
        self._board = board

    def routes(self) -> list[ApiRoute]:
        return [Route("GET", PATH, self._list), Route("GET DELETE", f"{PATH}/{{job_id:.+}}", self._one)]

    def _list(self, exchange: Exchange) -> Response:
        self._api.authenticate_operator(exchange.request)
        return json_response({"jobs": [job.as_json() for job in self._board.newest_first()]})

    def _one(self, exchange: Exchange, job_id: str) -> Response | None:
        self._api.authenticate_operator(exchange.request)
        job = self._board.find(job_id)
        if exchange.request.method != b"DELETE" or job.ended_at is not None:
            return json_response(job.as_json())
        if job.cancel is None:
            raise InvalidValue(f"An {job.kind} cannot be cancelled; it ends when the model's requests have.")
        job.is_cancelled = True
        job.on_end(lambda: exchange.respond(*json_response(job.as_json())))
        job.cancel()
        return None
