"""The routes of files and batches: `/v1/files`, `/v1/batches`, `/v1/messages/batches`, and `/fleet/batches`.

A key sees its own files and batches only.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cortex.gateway.api.parts import ApiRoute, number_in_query, read_body
from cortex.gateway.batches import tables
from cortex.gateway.batches.files import FileStore, chunks_of
from cortex.gateway.batches.lines import ENDPOINTS, MESSAGES
from cortex.gateway.batches.runner import BatchLimits, BatchRunner
from cortex.gateway.batches.tables import Batch, Kind, StoredFile
from cortex.gateway.config import BatchesSection
from cortex.gateway.database import Database, Execute
from cortex.gateway.ledger.groups import NANO
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.meter import ANONYMOUS, Metering
from cortex.gateway.ledger.users import is_user
from cortex.gateway.proxy.admission import client_of
from cortex.gateway.proxy.deferred_responses import respond
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.routes import HttpRoute, json_response
from cortex.http.cross_site import CrossSiteCheck
from cortex.http.request import Request
from cortex.http.routing import Route, in_memory, path_of, query, spooled
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.system.tasks import OwnedTasks, Supervisor
from cortex.wire.dialects.anthropic_messages.batch import parse_batch
from cortex.wire.errors import (
    CortexError,
    InvalidValue,
    RateLimitExceeded,
    ResponseNotFound,
    RouteNotFound,
    shorten,
)
from cortex.wire.fields.body import check_content_type
from cortex.wire.opaque import multipart

PURPOSES = ("batch", "user_data")
_MAX_PAGE = 1000
_MIN_LASTS_S = 3600
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_METADATA = 16
_MAX_FIELD_BYTES = 1000


class FileNotFound(ResponseNotFound):
    """There is no such file for the key."""

    code = "file_not_found"


class BatchNotFound(ResponseNotFound):
    """There is no such batch for the key."""

    code = "batch_not_found"


class _NewBatch(msgspec.Struct, frozen=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


_Work = Callable[..., Coroutine[Any, Any, Response | None]]


class BatchService:
    """Files and batches of a gateway. Owns a task for each request."""

    def __init__(
        self,
        section: BatchesSection,
        state_directory: Path,
        database: Database,
        inference: Inference,
        metering: Metering,
        tasks: Supervisor,
        limits: BatchLimits,
        cross_site: CrossSiteCheck,
    ) -> None:
        self._files = FileStore(database, section, state_directory / section.directory.expanduser())
        self._runner = BatchRunner(inference, self._files, metering, tasks, limits)
        self._metering = metering
        self._parser = inference.services.parser
        self._cross_site = cross_site
        self._tasks = OwnedTasks()

    def start(self) -> None:
        self._runner.start()

    def use(self, section: BatchesSection) -> None:
        """Use a new configuration. The directory needs a restart."""
        self._files.section = section

    async def close(self, grace_s: float) -> None:
        await self._runner.close(grace_s)
        await self._tasks.cancel()

    def routes(self) -> list[HttpRoute]:
        routes: list[Route[_Work]] = [
            Route("GET", "/v1/files", self._list_files),
            Route("POST", "/v1/files", self._upload, spooled),
            Route("GET", "/v1/files/{id}", self._show_file),
            Route("DELETE", "/v1/files/{id}", self._delete_file),
            Route("GET", "/v1/files/{id}/content", self._content),
            Route("GET", "/v1/batches", self._list_batches),
            Route("POST", "/v1/batches", self._create),
            Route("GET", "/v1/batches/{id}", self._show_batch),
            Route("POST", "/v1/batches/{id}/cancel", self._cancel),
        ]
        message_routes: list[Route[_Work]] = [
            Route("GET", "/v1/messages/batches", self._list_message_batches),
            Route("POST", "/v1/messages/batches", self._create_messages, in_memory),
            Route("GET", "/v1/messages/batches/{id}", self._show_messages),
            Route("DELETE", "/v1/messages/batches/{id}", self._delete_messages),
            Route("POST", "/v1/messages/batches/{id}/cancel", self._cancel_messages),
            Route("GET", "/v1/messages/batches/{id}/results", self._message_results),
        ]
        return [
            *(route.served_by(partial(self._begin_openai, route.handler)) for route in routes),
            *(route.served_by(partial(self._begin, route.handler)) for route in message_routes),
        ]

    def fleet_routes(self) -> list[ApiRoute]:
        return [Route("GET", "/fleet/batches", self._list_all)]

    def _begin_openai(self, work: _Work, exchange: Exchange, /, **values: str) -> None:
        """Anthropic's file API, which has the same paths, is not supported."""
        if exchange.request.header(b"anthropic-version") is not None:
            self._metering.meter.authenticate(exchange.request)
            raise RouteNotFound(f"There is no {shorten(path_of(exchange.request))}; GET / lists the routes.")
        self._begin(work, exchange, **values)

    def _begin(self, work: _Work, exchange: Exchange, /, **values: str) -> None:
        self._tasks.start(respond(exchange, self._response(work, exchange, values)))

    async def _response(self, work: _Work, exchange: Exchange, values: dict[str, str]) -> Response | None:
        request = exchange.request
        key = self._metering.meter.key(request)
        if request.method not in (b"GET", b"HEAD"):
            self._cross_site.check_origin(
                request.text(b"origin"), request.text(b"host"), request.text(b"sec-fetch-site")
            )
        try:
            return await work(exchange, key, **values)
        except FileNotFoundError as problem:
            raise FileNotFound("The content of the file no longer exists.") from problem

    # --- files

    async def _upload(self, exchange: Exchange, key: KeySection | None) -> Response:
        request = exchange.request
        boundary = multipart.boundary_of(request.text(b"content-type") or "")
        body = request.body if request.upload is None else request.upload
        parts = await asyncio.to_thread(multipart.parts, body, boundary)
        fields: dict[str, str] = {}
        file: multipart.FormPart | None = None
        for part in parts:
            if part.name == "file":
                file = part
            elif part.value_end - part.value_start <= _MAX_FIELD_BYTES:
                fields[part.name] = body[part.value_start : part.value_end].decode("utf-8", "replace")
        if file is None:
            raise InvalidValue("file: it is missing; send it as a part of the form.", param="file")
        purpose = fields.get("purpose", "")
        if purpose not in PURPOSES:
            raise InvalidValue(f"purpose: use one of {', '.join(PURPOSES)}.", param="purpose")
        stored = await self._files.save(
            _id_of(key),
            purpose,
            file.filename or "file",
            chunks_of(body, file.value_start, file.value_end),
            num_bytes=file.value_end - file.value_start,
            lasts_s=self._lasts_s(fields),
        )
        return json_response(_file(stored))

    def _lasts_s(self, fields: dict[str, str]) -> float:
        """How long an uploaded file is kept."""
        text, most = fields.get("expires_after[seconds]"), self._files.section.retention_s
        if text is None:
            return most
        if fields.get("expires_after[anchor]", "created_at") != "created_at":
            raise InvalidValue("expires_after.anchor: it must be created_at.", param="expires_after")
        if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) >= _MIN_LASTS_S):
            raise InvalidValue(f"expires_after.seconds: it must be at least {_MIN_LASTS_S}.", param="expires_after")
        return min(most, int(text))

    async def _list_files(self, exchange: Exchange, key: KeySection | None) -> Response:
        request, now = exchange.request, self._files.clock()
        limit, is_ascending = _page(request, 1000)
        found = await self._files.do(
            lambda execute: tables.files(
                execute,
                _id_of(key),
                now,
                purpose=query(request, "purpose"),
                after=query(request, "after"),
                limit=limit + 1,
                ascending=is_ascending,
            )
        )
        return _listing(list(map(_file, found)), limit)

    async def _file_of(self, key: KeySection | None, id: str) -> StoredFile:
        now = self._files.clock()
        found = await self._files.do(lambda execute: tables.file(execute, _id_of(key), id, now))
        if found is None or found.purpose == tables.HIDDEN:
            raise FileNotFound(f"There is no file {shorten(id)} for this key.", param="file_id")
        return found

    async def _show_file(self, exchange: Exchange, key: KeySection | None, id: str) -> Response:
        del exchange
        return json_response(_file(await self._file_of(key, id)))

    async def _delete_file(self, exchange: Exchange, key: KeySection | None, id: str) -> Response:
        del exchange
        await self._file_of(key, id)
        if await self._files.do(lambda execute: tables.is_in_use(execute, id)):
            raise InvalidValue("A batch that has not ended reads this file; cancel the batch first.", param="file_id")
        await self._files.delete(id)
        return json_response({"id": id, "object": "file", "deleted": True})

    async def _content(self, exchange: Exchange, key: KeySection | None, id: str) -> None:
        file = await self._file_of(key, id)
        name = re.sub(r'[^\x20-\x7e]|["\\]', "_", file.filename)
        headers = (
            (b"content-type", b"application/octet-stream"),
            (b"content-disposition", f'attachment; filename="{name}"'.encode()),
        )
        await self._files.send(exchange, id, headers)

    # --- OpenAI's batches

    async def _create(self, exchange: Exchange, key: KeySection | None) -> Response:
        request = exchange.request
        check_content_type(request.text(b"content-type"), required=True)
        wanted = read_body(request.body, _NewBatch)
        if wanted.endpoint not in ENDPOINTS:
            raise InvalidValue(f"endpoint: use one of {', '.join(ENDPOINTS)}.", param="endpoint")
        file = await self._file_of(key, wanted.input_file_id)
        if file.purpose != "batch":
            raise InvalidValue("input_file_id: upload the file with the purpose `batch`.", param="input_file_id")
        metadata = wanted.metadata or {}
        if len(metadata) > _MAX_METADATA or any(len(name) > 64 or len(value) > 512 for name, value in metadata.items()):
            raise InvalidValue("metadata: at most 16 names of 64 and values of 512 characters.", param="metadata")
        batch = self._new(key, "openai", wanted.endpoint, wanted.completion_window, file.id, wanted.metadata)
        await self._add(batch)
        return json_response(_batch(batch))

    def _new(
        self,
        key: KeySection | None,
        kind: Kind,
        endpoint: str,
        window: str,
        file_id: str,
        metadata: dict[str, str] | None = None,
    ) -> Batch:
        if key is not None and is_user(key):
            raise InvalidValue("Batches outlive their client's connection; create them with a key.")
        match, most_s = _WINDOW.fullmatch(window), self._files.section.max_window_s
        window_s = int(match[1]) * _SECONDS[match[2]] if match is not None else 0
        if not 0 < window_s <= most_s:
            raise InvalidValue(
                f"completion_window: use a time such as 24h, up to {most_s / 3600:g}h.", param="completion_window"
            )
        now_s = self._files.clock()
        now = int(now_s)
        return Batch(
            id=tables.new_id("batch_" if kind == "openai" else "msgbatch_", now_s),
            key_id=_id_of(key),
            key_name=ANONYMOUS if key is None else key.name,
            kind=kind,
            endpoint=endpoint,
            completion_window=window,
            metadata=msgspec.json.encode(metadata).decode(),
            input_file_id=file_id,
            output_file_id=tables.new_id("file-", now_s),
            error_file_id=tables.new_id("file-", now_s),
            status="validating",
            created_s=now,
            expires_s=now + window_s,
            times="{}",
            problems="[]",
        )

    async def _add(self, batch: Batch) -> None:
        most = self._files.section.max_batches_per_key

        def add(execute: Execute) -> None:
            if tables.num_active(execute, batch.key_id) >= most:
                raise RateLimitExceeded(
                    f"{most} batches of this key have not ended, which is the limit (batches.max_batches_per_key)."
                )
            tables.add_batch(execute, batch)

        await self._files.do(add)
        self._runner.kick()

    async def _list_batches(self, exchange: Exchange, key: KeySection | None) -> Response:
        limit, is_ascending = _page(exchange.request, 20)
        after = query(exchange.request, "after")
        found = await self._files.do(
            lambda execute: tables.batches(
                execute, _id_of(key), kind="openai", after=after, limit=limit + 1, ascending=is_ascending
            )
        )
        return _listing(list(map(_batch, found)), limit)

    async def _batch_of(self, key: KeySection | None, id: str, kind: Kind) -> Batch:
        found = await self._files.do(lambda execute: tables.batch(execute, _id_of(key), id, kind))
        if found is None:
            raise BatchNotFound(f"There is no batch {shorten(id)} for this key.", param="batch_id")
        return found

    async def _show_batch(self, exchange: Exchange, key: KeySection | None, id: str) -> Response:
        del exchange
        return json_response(_batch(await self._batch_of(key, id, "openai")))

    async def _cancel(self, exchange: Exchange, key: KeySection | None, id: str) -> Response:
        del exchange
        return json_response(_batch(await self._cancelled(key, id, "openai")))

    async def _cancelled(self, key: KeySection | None, id: str, kind: Kind) -> Batch:
        found = await self._batch_of(key, id, kind)
        if not found.is_active:
            if kind == "anthropic":
                return found
            raise InvalidValue(f"The batch is {found.status} and can no longer be cancelled.", param="batch_id")
        now = self._files.clock()
        moved = await self._files.do(
            lambda execute: tables.move(execute, id, None, "cancelling", now, ("validating", "in_progress"))
        )
        self._runner.kick()
        return moved or await self._batch_of(key, id, kind)

    # --- Anthropic's batches

    async def _create_messages(self, exchange: Exchange, key: KeySection | None) -> Response:
        request, section = exchange.request, self._files.section
        check_content_type(request.text(b"content-type"), required=True)
        batch = self._new(key, "anthropic", MESSAGES, "24h", "")
        client = client_of(key, request)
        text, num_lines = await self._parser.run(parse_batch, section.max_lines, body=request.body, client=client)
        file = await self._files.save(
            _id_of(key), tables.HIDDEN, f"{batch.id}.jsonl", [text], num_bytes=len(text), lasts_s=section.retention_s
        )
        batch = msgspec.structs.replace(batch, input_file_id=file.id, num_lines=num_lines)
        try:
            await self._add(batch)
        except CortexError:
            await self._files.delete(file.id)
            raise
        return json_response(_message_batch(batch))

    async def _list_message_batches(self, exchange: Exchange, key: KeySection | None) -> Response:
        request = exchange.request
        limit = max(1, number_in_query(request, "limit", 20, most=_MAX_PAGE))
        before, after = query(request, "before_id"), query(request, "after_id")
        found = await self._files.do(
            lambda execute: tables.batches(
                execute,
                _id_of(key),
                kind="anthropic",
                after=before or after,
                limit=limit + 1,
                ascending=before is not None,
            )
        )
        data = list(map(_message_batch, found[:limit]))
        if before is not None:
            data.reverse()
        return json_response(_listed(data, has_more=len(found) > limit))

    async def _show_messages(self, exchange: Exchange, key: KeySection | None, id: str) -> Response:
        del exchange
        return json_response(_message_batch(await self._batch_of(key, id, "anthropic")))

    async def _cancel_messages(self, exchange: Exchange, key: KeySection | None, id: str) -> Response:
        del exchange
        return json_response(_message_batch(await self._cancelled(key, id, "anthropic")))

    async def _delete_messages(self, exchange: Exchange, key: KeySection | None, id: str) -> Response:
        del exchange
        batch = await self._batch_of(key, id, "anthropic")
        if batch.is_active:
            raise InvalidValue("The batch has not ended; cancel it first.", param="message_batch_id")
        for file_id in (batch.input_file_id, batch.output_file_id):
            await self._files.delete(file_id)
        await self._files.do(lambda execute: tables.drop_batch(execute, id))
        return json_response({"id": id, "type": "message_batch_deleted"})

    async def _message_results(self, exchange: Exchange, key: KeySection | None, id: str) -> None:
        batch = await self._batch_of(key, id, "anthropic")
        if batch.is_active:
            raise RouteNotFound("The batch has no results yet; wait until its processing_status is ended.")
        await self._files.send(exchange, batch.output_file_id, ((b"content-type", b"application/x-jsonl"),))

    # --- the fleet

    async def _list_all(self, exchange: Exchange) -> Response:
        """The latest batches of both APIs: of all keys for an operator, else of the key."""
        request = exchange.request
        key = self._metering.meter.key(request)
        key_id = None if key is None or key.operator else key.id
        limit = number_in_query(request, "limit", 100, most=_MAX_PAGE)
        found = await self._files.do(lambda execute: tables.batches(execute, key_id, kind=None, limit=limit))
        return json_response({"batches": [_summary(each, _id_of(key)) for each in found]})


def _id_of(key: KeySection | None) -> str:
    return "" if key is None else key.id


def _page(request: Request, default: int) -> tuple[int, bool]:
    order = query(request, "order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidValue("order: it must be `asc` or `desc`.", param="order")
    return max(1, number_in_query(request, "limit", default, most=_MAX_PAGE)), order == "asc"


def _listing(data: list[dict[str, Any]], limit: int) -> Response:
    return json_response({"object": "list", **_listed(data[:limit], has_more=len(data) > limit)})


def _listed(shown: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"data": shown, "first_id": first_id, "last_id": last_id, "has_more": has_more}


def _file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _batch(batch: Batch) -> dict[str, Any]:
    """As OpenAI's clients know it, with what it has cost."""
    times: dict[str, int] = msgspec.json.decode(batch.times)
    problems = msgspec.json.decode(batch.problems)
    has_ended = not batch.is_active
    num_failed = batch.num_failed + batch.num_cancelled + batch.num_expired
    is_written = has_ended and batch.status != "failed"
    moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if is_written and batch.num_succeeded else None,
        "error_file_id": batch.error_file_id if is_written and num_failed else None,
        "created_at": batch.created_s,
        "expires_at": batch.expires_s,
        **{f"{name}_at": times.get(name) for name in moments},
        "request_counts": {"total": batch.num_lines, "completed": batch.num_succeeded, "failed": num_failed},
        "metadata": msgspec.json.decode(batch.metadata),
        "usage": {
            "input_tokens": batch.prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
        },
        "cost": _cost(batch),
    }


def _message_batch(batch: Batch) -> dict[str, Any]:
    """As Anthropic's clients know it."""
    times: dict[str, int] = msgspec.json.decode(batch.times)
    ended = next((times[name] for name in ("completed", "cancelled", "expired", "failed") if name in times), None)
    done = batch.num_succeeded + batch.num_failed + batch.num_cancelled + batch.num_expired
    is_active = batch.is_active
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": ("canceling" if batch.status == "cancelling" else "in_progress") if is_active else "ended",
        # Clients expect the counts only at the end.
        "request_counts": {
            "processing": batch.num_lines if is_active else batch.num_lines - done,
            "succeeded": 0 if is_active else batch.num_succeeded,
            "errored": 0 if is_active else batch.num_failed,
            "canceled": 0 if is_active else batch.num_cancelled,
            "expired": 0 if is_active else batch.num_expired,
        },
        "created_at": _moment(batch.created_s),
        "expires_at": _moment(batch.expires_s),
        "ended_at": _moment(ended),
        "cancel_initiated_at": _moment(times.get("cancelling")),
        "archived_at": None,
        "results_url": None if is_active else f"/v1/messages/batches/{batch.id}/results",
    }


def _summary(batch: Batch, key_id: str) -> dict[str, Any]:
    """For `cortex batch ls` and the page."""
    done = batch.num_succeeded + batch.num_failed + batch.num_cancelled + batch.num_expired
    return {
        "id": batch.id,
        "key": batch.key_name,
        "is_own": batch.key_id == key_id,
        "api": batch.kind,
        "endpoint": batch.endpoint,
        "status": batch.status,
        "created_at": batch.created_s,
        "expires_at": batch.expires_s,
        "lines": batch.num_lines,
        "done": done,
        "failed": done - batch.num_succeeded,
        "tokens": batch.prompt_tokens + batch.completion_tokens,
        "cost": _cost(batch),
    }


def _cost(batch: Batch) -> float:
    return round(batch.cost_nano / NANO, 6)


def _moment(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
