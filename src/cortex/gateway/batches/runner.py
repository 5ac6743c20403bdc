"""Runs batches: one gateway owns each batch, runs its lines where they slow no one down, and records every result once.

The owner shows in the database that it is alive. Where it does not for `lost_after_s`, another gateway takes the batch
over and runs the lines that have no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import IO, cast

import msgspec

from cortex.gateway.batches import lines as batch_lines
from cortex.gateway.batches import tables
from cortex.gateway.batches.files import FileStore
from cortex.gateway.batches.lines import InvalidLine, Line
from cortex.gateway.batches.results import PAGE, RENEW_S, BatchResults, Finished, Lost
from cortex.gateway.batches.tables import Batch, Kind, Outcome
from cortex.gateway.database import StoreError
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.limits import Estimate
from cortex.gateway.ledger.meter import LineReservation, Metering
from cortex.gateway.proxy.admission import ReceivedRequest, resolve_for
from cortex.gateway.proxy.inference import Inference, request_id_of
from cortex.gateway.proxy.redaction import shown_to
from cortex.gateway.proxy.routes import ROUTES, error_response
from cortex.http.request import Request
from cortex.http.server.detached import DetachedExchange
from cortex.system.tasks import SupervisedTask, Supervisor
from cortex.wire.errors import CortexError, InsufficientQuota, InvalidAPIKey, InvalidValue
from cortex.wire.node.load_options import ENGINE

log = logging.getLogger(__name__)

PURGE_S = 30.0
MAX_OWNED = 64
"""Batches that one gateway runs at once."""
MAX_UNWRITTEN = 512
"""Results held in memory; no line starts while there are more."""
MAX_RESULT_BYTES = 64 * 1024 * 1024
NUM_PROBLEMS = 100
_BUSY = (503, 507, 529)
"""The model is unavailable, or its nodes are busy: the line waits for as long as its batch."""
_FAULTY = (429, 499, 500, 502, 504)
JSON = ((b"content-type", b"application/json"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits that are not settings and equal for all gateways."""

    renew_s: float = RENEW_S
    lost_after_s: float = 30.0
    """A batch whose owner has not renewed its claim for this long is taken over."""
    pump_s: float = 0.25
    max_tries: int = 3
    """How often a line is tried when nodes fail."""
    min_backoff_s: float = 0.5
    max_backoff_s: float = 30.0


class _LineRun:
    """A line while it runs: the sink of its exchange, and the idle work of its request."""

    def __init__(self, runner: BatchRunner, line: Line, node: str, avoided: frozenset[str], *, is_paced: bool) -> None:
        self._runner = runner
        self.line = line
        self.node = node
        """The node where it counts; empty if its model is ready nowhere."""
        self.is_probe = not node
        self.is_paced = is_paced
        """Whether an engine runs it there."""
        self.avoided = avoided
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exchange: DetachedExchange | None = None
        self.status = 0
        self.body = bytearray()
        self.reserved: LineReservation | None = None
        self.is_finished = False
        """Whether the line has a result."""
        self.awaits_budget = False
        """A budget had too little left for it, but will recover: its window moves on, or requests end."""

    @property
    def reservation(self) -> LineReservation:
        assert self.reserved is not None
        return self.reserved

    def sent_to(self, node: str) -> None:
        if node != self.node:
            self._runner.count(self, -1)
            self.node, self.is_paced = node, self._runner.replicas(self.line.model).get(node, False)
            self._runner.count(self, 1)

    def on_start(self, status: int) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > MAX_RESULT_BYTES and self.exchange is not None:
            self.exchange.cancel()
            problem = InvalidValue(f"The response has more than {MAX_RESULT_BYTES} bytes.")
            self.status, self.body = (
                problem.status,
                bytearray(msgspec.json.encode({"error": {"message": str(problem)}})),
            )
            self.on_end()

    def on_end(self) -> None:
        # The usage is settled in this turn of the loop, before or after.
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class _BatchRun:
    """A batch that this gateway owns."""

    def __init__(self, batch: Batch, input: IO[bytes], results: BatchResults) -> None:
        self.batch = batch
        self.input = input
        self.pending: dict[str, deque[Line]] = {}
        """By model, each with at least one line. Lines with the same beginning are next to each other."""
        self.running: dict[asyncio.Task[None], _LineRun] = {}
        self.results = results
        self.tries: Counter[int] = Counter()
        self.is_stopping = False
        self.wake = asyncio.Event()
        self.retry_at: dict[str, tuple[float, float]] = {}
        """By model: when its lines may run again, and the current back-off."""
        self.node_of: dict[str, str] = {}
        """Where the last line of each model ran; the next one likely shares its prefix."""

    @property
    def kind(self) -> Kind:
        return cast("Kind", self.batch.kind)

    def close(self) -> None:
        self.input.close()
        self.results.close()


class BatchRunner:
    """Runs the batches that this gateway owns. Used on the loop's thread."""

    def __init__(
        self, inference: Inference, files: FileStore, metering: Metering, tasks: Supervisor, limits: BatchLimits
    ) -> None:
        self._limits = limits
        self._inference = inference
        self._services = inference.services
        self._files = files
        self._metering = metering
        self._tasks = tasks
        self._owner = secrets.token_hex(8)
        self._runs: dict[str, _BatchRun] = {}
        self._batch_tasks: dict[str, asyncio.Task[None]] = {}
        self._regular: list[SupervisedTask] = []
        self._is_closing = False
        self._probing: set[str] = set()
        """Models that are ready nowhere, for which a line waits."""
        self._claim_at = -math.inf
        self._has_claimed = False
        self.caps = self._services.idle_caps

    def start(self) -> None:
        self._regular = [
            self._tasks.start("batches", self._work_regularly),
            self._tasks.every(PURGE_S, "purge of files", self._purge),
        ]

    def kick(self) -> None:
        """A batch was created or cancelled."""
        self._claim_at = -math.inf
        for run in self._runs.values():
            run.results.renewed_at = -math.inf
            run.wake.set()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop starting lines, wait up to `grace_s` for running ones, and release the batches to other gateways."""
        self._is_closing = True
        deadline = time.monotonic() + grace_s
        while any(run.running for run in self._runs.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for regular in self._regular:
            regular.cancel()
            await regular.ended()
        for run in tuple(self._runs.values()):  # one may end meanwhile
            await self._abort(run)
        for task in self._batch_tasks.values():
            task.cancel()
        await asyncio.gather(*self._batch_tasks.values(), return_exceptions=True)

    # --- owning batches

    async def _work_regularly(self) -> None:
        while True:
            now = time.monotonic()
            if now - self._claim_at >= self._limits.renew_s and not self._is_closing:
                self._claim_at = now
                with contextlib.suppress(StoreError):  # reported by the database
                    await self._claim()
            self._pump()
            await asyncio.sleep(self._limits.pump_s)

    async def _purge(self) -> None:
        with contextlib.suppress(CortexError, OSError):
            await self._files.purge()

    async def _claim(self) -> None:
        now = self._files.clock()
        # A database that no other gateway uses has no other owner: the named one is this gateway before its restart.
        is_alone = not self._has_claimed and not self._files.database.is_shared
        lost_s = now + 1 if is_alone else now - self._limits.lost_after_s
        limit = MAX_OWNED - len(self._runs)
        claimed = await self._files.database.do(
            lambda execute: tables.claim(execute, self._owner, now, lost_s, limit) if limit > 0 else []
        )
        self._has_claimed = True
        for batch in claimed:
            if batch.id in self._batch_tasks:
                continue
            task = asyncio.create_task(self._own(batch), name=f"batch {batch.id}")
            self._batch_tasks[batch.id] = task
            task.add_done_callback(lambda _, id=batch.id: self._batch_tasks.pop(id, None))  # type: ignore[misc]

    async def _own(self, batch: Batch) -> None:
        run: _BatchRun | None = None
        try:
            run = await self._open(batch)
            if run is not None:
                self._runs[batch.id] = run
                await self._drive(run)
        except Lost:
            log.warning("another gateway runs batch %s now", batch.id)
        except asyncio.CancelledError:
            if run is not None:
                with contextlib.suppress(StoreError, Lost):
                    await asyncio.shield(run.results.write())
            with contextlib.suppress(StoreError):
                await asyncio.shield(
                    self._files.database.do(lambda execute: tables.release(execute, batch.id, self._owner))
                )
            raise
        except Exception:
            log.exception("batch %s failed unexpectedly; it is tried again", batch.id)
            await asyncio.sleep(self._limits.renew_s)
            with contextlib.suppress(StoreError):
                await self._files.database.do(lambda execute: tables.release(execute, batch.id, self._owner))
        finally:
            self._runs.pop(batch.id, None)
            if run is not None:
                await self._abort(run)
                run.close()

    async def _open(self, batch: Batch) -> _BatchRun | None:
        """Read the lines of a batch, and which of them have results. None: it cannot run, and has failed."""
        section, read = self._files.section, None
        try:
            file = await asyncio.to_thread(open, self._files.path(batch.input_file_id), "rb")
            try:
                read = await asyncio.to_thread(lambda: list(batch_lines.read(file, batch.endpoint, section.max_lines)))
                if not any(isinstance(line, Line) for line in read) and batch.kind == "openai":
                    problems = [each.as_problem() for each in read if isinstance(each, InvalidLine)][:NUM_PROBLEMS]
                    await self._fail(batch, problems or [_problem("empty_file", "The input file has no lines.")])
                    file.close()
                    return None
            except BaseException:
                file.close()
                raise
        except InvalidValue as problem:
            await self._fail(batch, [_problem(problem.code, problem.message)])
            return None
        except FileNotFoundError:
            await self._fail(batch, [_problem("file_not_found", "The input file no longer exists.")])
            return None
        run = _BatchRun(batch, file, BatchResults(self._files, batch, self._owner, self._limits.renew_s))
        invalid = [line for line in read if isinstance(line, InvalidLine)]
        if batch.status == "validating" or not batch.num_lines:
            shown = msgspec.json.encode([each.as_problem() for each in invalid[:NUM_PROBLEMS]]).decode()
            now = self._files.clock()
            await self._files.database.do(
                lambda execute: tables.begin(execute, batch.id, self._owner, now, len(read), shown)
            )
        done: set[int] = set()
        while page := await self._files.database.do(
            lambda execute: tables.results(execute, batch.id, max(done, default=0), PAGE)
        ):
            done.update(result.number for result in page)
        run.results.num_left = len(read) - len(done)
        for each in invalid:
            if each.number not in done:
                run.results.add(Finished(each.number, "failed", batch_lines.invalid_line(run.kind, each)))
        run.pending = await asyncio.to_thread(_by_model, read, done)
        return run

    async def _fail(self, batch: Batch, problems: list[dict[str, object]]) -> None:
        shown, now = msgspec.json.encode(problems).decode(), self._files.clock()
        values = {"problems": shown, "owner": ""}
        await self._files.database.do(
            lambda execute: tables.move(execute, batch.id, self._owner, "failed", now, tables.ACTIVE, values)
        )

    async def _drive(self, run: _BatchRun) -> None:
        """Run a batch to its end. Raises Lost."""
        is_disk_full = False
        while True:
            try:
                if time.monotonic() - run.results.renewed_at >= self._limits.renew_s:
                    await run.results.renew()
                await run.results.write()
                is_disk_full = False
                outcome: Outcome | None = None
                if run.results.status == "cancelling":
                    outcome = "cancelled"
                elif self._files.clock() >= run.batch.expires_s:
                    outcome = "expired"
                if outcome is not None and run.results.num_left:
                    await self._stop(run, outcome)
                if not run.results.num_left:
                    break
            except StoreError:
                await asyncio.sleep(self._limits.renew_s)  # reported by the database
                continue
            except OSError as problem:
                if not is_disk_full:
                    log.error("results of batch %s cannot be written yet: %s", run.batch.id, problem)
                is_disk_full = True
                await asyncio.sleep(self._limits.renew_s)
                continue
            run.wake.clear()
            self._pump()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.renew_s if not run.results.num_unwritten else 0):
                    await run.wake.wait()
        try:
            await run.results.finalise()
        except FileNotFoundError:
            await self._fail(run.batch, [_problem("results_lost", "The results no longer exist.")])

    async def _stop(self, run: _BatchRun, outcome: Outcome) -> None:
        """Give the lines without a result one that says why."""
        run.is_stopping = True
        left = [line for lines in run.pending.values() for line in lines] + await self._abort(run)
        run.pending.clear()
        for finished in await asyncio.to_thread(_unrun, run.kind, left, outcome):
            run.results.add(finished)
        await run.results.write()

    async def _abort(self, run: _BatchRun) -> list[Line]:
        """End the lines that run, without results; returns them."""
        running = dict(run.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return [work.line for work in running.values() if work.line not in run.results]

    # --- starting lines

    def _pump(self) -> None:
        """Start the lines that may run now, one of each batch in turn."""
        now = self._services.clock()
        local = time.localtime(self._files.clock())
        is_open = self._files.section.is_open(local.tm_hour * 60 + local.tm_min)
        if self._is_closing or not self._runs or not is_open:
            return
        self.caps.most = self._files.section.max_lines_per_node
        room = self._room(now)
        is_any = True
        while is_any:
            is_any = False
            for run in tuple(self._runs.values()):
                may_start = not run.is_stopping and run.results.num_unwritten < MAX_UNWRITTEN
                if may_start and self._start_next(run, room, now):
                    is_any = True
                    self._runs[run.batch.id] = self._runs.pop(run.batch.id)  # its turn is after that of the others

    def _room(self, now: float) -> dict[str, int]:
        """How many more lines each node may run: none where a model could be loaded for waiting requests."""
        dispatcher = self._services.dispatcher
        in_flight: Counter[str] = Counter()
        for target, count in dispatcher.in_flight.items():
            in_flight[target.node] += count
        fleet = dispatcher.fleet
        wanted = {node.name for model in dispatcher.awaited_models for node in fleet.listing(model)}
        return {
            node.name: 0
            if node.name in wanted
            else self.caps.cap(
                node.name, now, num_interactive=max(0, in_flight[node.name] - self.caps.lines[node.name])
            )
            - self.caps.lines[node.name]
            for node in fleet.nodes
            if node.healthy and not node.draining
        }

    def _start_next(self, run: _BatchRun, room: dict[str, int], now: float) -> bool:
        for model, waiting in run.pending.items():
            if run.retry_at.get(model, (0.0, 0.0))[0] > now:
                continue
            replicas = self.replicas(model)
            ready = [node for node in replicas if node in room]
            if ready:
                last = run.node_of.get(model, "")
                node = last if last in ready and room[last] > 0 else max(ready, key=lambda name: room[name])
                if room[node] <= 0:
                    continue
                room[node] -= 1
                run.node_of[model] = node
                avoided, is_paced = frozenset(ready) - {node}, replicas[node]
            elif model in self._probing or len(self._probing) >= self.caps.most:
                continue
            else:
                self._probing.add(model)
                node, avoided, is_paced = "", frozenset(), False
            line = waiting.popleft()
            if not waiting:
                del run.pending[model]
            work = _LineRun(self, line, node, avoided, is_paced=is_paced)
            self.count(work, 1)
            task = asyncio.create_task(self._run_line(run, work), name=f"line {line.number}")
            run.running[task] = work
            task.add_done_callback(partial(self._line_ended, run))
            return True
        return False

    def count(self, work: _LineRun, change: int) -> None:
        """Add a line to those of its node, or remove it."""
        self.caps.lines[work.node] += change
        self.caps.paced[work.node] += change * work.is_paced

    def replicas(self, model: str) -> dict[str, bool]:
        """The nodes that have the model ready, and whether an engine runs it there."""
        dispatcher = self._services.dispatcher
        try:
            model_id = dispatcher.resolve(model).model_id
        except CortexError:
            return {}  # admission says why
        return {
            node.name: node.abilities.takes_orders and held.status.harness == ENGINE
            for node, held in dispatcher.fleet.replicas(model_id)
        }

    def _line_ended(self, run: _BatchRun, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        work = run.running.pop(task)
        line = work.line
        self.count(work, -1)
        if work.is_probe:
            self._probing.discard(line.model)
        if not work.is_finished:
            if work.reserved is not None:
                work.reserved.end(is_recorded=False)
            if not run.is_stopping:
                run.pending.setdefault(line.model, deque()).appendleft(line)
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("a line of batch %s failed unexpectedly", run.batch.id, exc_info=problem)
            self._back_off(run, line.model, work.node, is_busy=False)
        run.wake.set()

    async def _run_line(self, run: _BatchRun, work: _LineRun) -> None:
        """Run one line; it has a result afterwards, or is pending again."""
        line = work.line
        request_id = request_id_of(None)
        try:
            text = await asyncio.to_thread(os.pread, run.input.fileno(), line.num_bytes, line.start)
            self._send(run, text, request_id, work)
            await work.ended
            status = work.status
            has_budget = work.reserved is not None and not work.reserved.is_exhausted
            is_busy = status in _BUSY or (status == 429 and has_budget)
            is_cut_off = status < 400 and not batch_lines.is_json(work.body)
            is_faulty = (status in _FAULTY or is_cut_off) and run.tries[line.number] + 1 < self._limits.max_tries
            if is_busy or is_faulty or work.awaits_budget:
                run.tries[line.number] += is_faulty and not is_busy and not work.awaits_budget
                self._back_off(run, line.model, work.node, is_busy=is_busy)
                return
            run.retry_at.pop(line.model, None)
            self.caps.completed(work.node, self._services.clock())
            outcome, result = batch_lines.response_line(
                run.kind, line.custom_id, status, request_id.decode(), bytes(work.body)
            )
            run.results.add(Finished(line.number, outcome, result, work.reserved))
            work.is_finished = True
        except asyncio.CancelledError:
            if work.exchange is not None:
                work.exchange.cancel()
            raise

    def _back_off(self, run: _BatchRun, model: str, node: str, *, is_busy: bool) -> None:
        """Only for this batch: another one may have budget left, or a model with a free node."""
        now = self._services.clock()
        if is_busy and node:
            self.caps.full(node, now)
        at, delay_s = run.retry_at.get(model, (0.0, 0.0))
        if at <= now:
            delay_s = min(self._limits.max_backoff_s, max(self._limits.min_backoff_s, 2 * delay_s))
            run.retry_at[model] = (now + delay_s, delay_s)

    def _send(self, run: _BatchRun, text: bytes, request_id: bytes, work: _LineRun) -> None:
        route = ROUTES[run.batch.endpoint.encode()]
        request = Request(b"POST", route.path, b"", JSON, batch_lines.body_of(text), "batch")
        exchange = work.exchange = DetachedExchange(request, work)
        services = self._services
        try:
            key = self._key(run.batch)
        except CortexError as error:
            exchange.respond(*error_response(error, route.family))
            return

        def serve(received: ReceivedRequest) -> None:
            try:
                summary, body = received.envelope.summary, received.body
                resolve_for(services.dispatcher, key, summary.model)  # before an error tells the cost
                estimate = Estimate(
                    len(body) - summary.picture_bytes,
                    summary.completion_limit if route.generates else 0,
                    summary.num_choices,
                    services.dispatcher.context_tokens(summary.model),
                    picture_tokens=summary.picture_tokens,
                )
                prices, price = services.dispatcher.cost(summary.model), self._files.section.price
                work.reserved = LineReservation(self._metering.ledger, key, estimate, prices, price)
            except CortexError as error:
                work.awaits_budget = isinstance(error, InsufficientQuota) and error.retry_after_s is not None
                self._inference.reject(received, shown_to(key, error))
                return
            self._inference.serve(received)

        span = services.tracer.begin(route.span_name, None)
        received = ReceivedRequest(exchange, route, request_id, span, services.clock(), key, idle=work)
        self._inference.read(received, serve)

    def _key(self, batch: Batch) -> KeySection | None:
        """The key of a batch; None on an open gateway. Raises InvalidAPIKey for one that is no longer valid."""
        if self._metering.is_open:
            return None
        ledger = self._metering.ledger
        key = ledger.keyring.find(batch.key_id) if ledger is not None else None
        if key is None:
            raise InvalidAPIKey("The key of this batch was removed, or has expired.")
        return key


def _by_model(read: list[Line | InvalidLine], done: set[int]) -> dict[str, deque[Line]]:
    """The lines to run, as `_BatchRun.pending` has them. Takes long for a large batch."""
    found: dict[str, deque[Line]] = {}
    waiting = [line for line in read if isinstance(line, Line) and line.number not in done]
    for line in sorted(waiting, key=lambda line: (line.model, line.prefix, line.number)):
        found.setdefault(line.model, deque()).append(line)
    return found


def _unrun(kind: Kind, left: list[Line], outcome: Outcome) -> list[Finished]:
    """The results of lines that did not run. Takes long for a large batch."""
    return [
        Finished(line.number, outcome, batch_lines.unrun_line(kind, line.number, line.custom_id, outcome))
        for line in left
    ]


def _problem(code: str, message: str) -> dict[str, object]:
    return {"code": code, "line": None, "message": message, "param": None}
