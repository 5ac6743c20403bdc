"""One request to a model that a server of its own runs, from the load to the last event of the response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from cortex.foreign.body import Access, ServerFields, server_body
from cortex.foreign.chat_response import ForeignResponse
from cortex.http.request import Headers
from cortex.http.upstream.call import UpstreamCall
from cortex.http.upstream.faults import UpstreamFault, UpstreamSilent
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.choice import Stopwatch
from cortex.neuron.api.inference.engine_requests import within_limit
from cortex.neuron.api.inference.server_slot import ServerSlot
from cortex.neuron.api.inference.session import Deliver, Phase, ready
from cortex.neuron.node.harness.harness import Upstream
from cortex.parsing.picture_scan import find_pictures
from cortex.wire.dialects import openai_chat
from cortex.wire.errors import CortexError, InvalidValue, ModelNotFound, UpstreamInterrupted, UpstreamUnavailable
from cortex.wire.events import AnyEvent, Finish, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from cortex.wire.packed_request import PackedRequest, unpack
from cortex.wire.pictures.files import with_files
from cortex.wire.requests import GenerateRequest
from cortex.wire.response import total_usage
from cortex.wire.tenant import EVERYBODY, SALT

_PATH = b"/v1/chat/completions"
_JSON: Headers = ((b"content-type", b"application/json"),)
_STREAMS_WITH_OPTIONS = ("/v1/chat/completions", "/v1/completions")
"""Paths whose streams report usage only if the request has `stream_options`."""


class RelayedSession:
    """Owned by one request's task. However it ends, the server's response has ended or is aborted."""

    def __init__(
        self,
        backend: Backend,
        drain_gate: DrainGate,
        packed: PackedRequest,
        upstream: Upstream,
        chat: bytes | None,
        access: Access,
        *,
        id: str,
        principal: str,
        token_limit: int | None = None,
        gateway_s: float = 0.0,
    ) -> None:
        """`chat`: the body of a chat request as the client sent it, with the fields of `access`; None: the request is
        translated. `token_limit` and
        `gateway_s`: as `Session` has them; the prompt counts as one token per byte, because that is the most that it
        can have, but pictures by their size: their files have far more bytes than tokens."""
        self.phase: Phase = "load"
        """The current phase; after the end, the last one."""
        self.first_token_s: float | None = None
        """Unknown: a server may send its first piece long after its first token."""
        self._backend = backend
        self._drain_gate = drain_gate
        self._packed = packed
        self._upstream = upstream
        self._chat = chat
        self._access: Access = access if chat is not None else "any"
        self._id = id
        self._principal = principal
        self._token_limit = token_limit
        self._call: UpstreamCall | None = None
        self._num_sent_tokens = 0
        """Upper bound on the prompt's tokens, once it was sent."""
        self._num_deltas = 0
        self._gateway_s = gateway_s
        self._stopwatch: Stopwatch
        self._finishes: list[Finish] = []

    @property
    def usage(self) -> Usage:
        """The usage that the server reported; without a report, an estimate from the request and the pieces of the
        response."""
        total = total_usage(self._finishes)
        is_reported = total.prompt_tokens or total.completion_tokens
        return total if is_reported else Usage(prompt_tokens=self._num_sent_tokens, completion_tokens=self._num_deltas)

    async def run(self, deliver: Deliver) -> None:
        """As `Session.run`."""
        arrived_s = time.monotonic()
        self._upstream.check_route(_PATH.decode())
        body, num_prompt_tokens = await asyncio.to_thread(self.make_body)
        model = self._packed.head.model
        await self._drain_gate.wait_for(ready(self._backend, model, is_of_gateway=bool(self._principal)))
        self.phase = "prefill"
        response = _Response(self._packed.head.stream, asyncio.get_running_loop().create_future())

        def receive_events(events: list[AnyEvent]) -> None:
            if self.phase == "prefill":
                self.phase = "decode"
                if response.is_whole:
                    self._stopwatch.note_whole()
                else:
                    self._stopwatch.note_output()
                self._upstream.produced(self._id)
            deliver([self._observed(event) for event in events])

        slot = ServerSlot(self._backend, model, self._id, self._principal, self._packed.head.level)
        try:
            await slot.wait()
            slot.on_lost = response.fail
            self._stopwatch = Stopwatch(arrived_s, time.monotonic(), self._gateway_s)
            response.deliver = receive_events
            self._call = self._upstream.pool().send(b"POST", _PATH, _JSON, body, response)
            self._num_sent_tokens = num_prompt_tokens
            try:
                await response.ended
            except UpstreamFault as fault:
                if isinstance(fault, UpstreamSilent):
                    await self._upstream.end_if_hung(str(fault))
                slot.release()  # the server may live, and others wait for it
                await self._upstream.check_lost()
                raise UpstreamInterrupted(f"The model's server failed: {fault}; try again.") from fault
            except CortexError as error:
                if response.is_rejected:
                    self._num_sent_tokens = 0
                elif isinstance(error, UpstreamInterrupted):  # the connection ended within a stream
                    slot.release()
                    await self._upstream.check_lost()
                raise
            used = self.usage
            self._upstream.finished(self._id, used.prompt_tokens, used.completion_tokens)
        finally:
            if self._call is not None:
                self._call.abort()
            slot.release()

    def pause(self) -> None:
        """Deliver nothing until `resume`, because the client reads too slowly."""
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        if self._call is not None:
            self._call.resume()

    def _observed(self, event: AnyEvent) -> AnyEvent:
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            self._num_deltas += 1
        if isinstance(event, Finish):
            event = msgspec.structs.replace(event, timing=self._stopwatch.timing().with_reported(event.timing))
            self._finishes.append(event)
        return event

    def make_body(self) -> tuple[bytes, int]:
        """The body for the server: a chat request as the client sent it with the operator's fields, or another request
        translated to chat; and an upper bound on its prompt tokens. Raises InvalidValue or InsufficientQuota."""
        head = self._packed.head
        if head.prompt is not None:
            raise InvalidValue(
                f"{head.model} is run by the server of the harness {self._upstream.harness}, which takes a prompt at "
                "/v1/completions only; send conversations to /v1/chat/completions, /v1/responses, /v1/messages or "
                "/api/chat",
                param="prompt",
            )
        if self._chat is None:
            chat = openai_chat.build(with_files(unpack(self._packed.whole()), self._packed.files))
        else:
            chat = self._chat
        pictures = find_pictures(chat, openai_chat.DIALECT.fields.scan(chat), "openai_chat")
        num_bytes = len(chat) - pictures.num_bytes
        path, num_tokens = _PATH.decode(), num_bytes + pictures.num_tokens
        fields, without = operator_fields(self._upstream, path, head, num_tokens, self._token_limit)
        body = server_body(path, chat, without, self._access).with_fields(fields)
        return body, len(body) - pictures.num_bytes + pictures.num_tokens


def operator_fields(
    upstream: Upstream, path: str, head: GenerateRequest, num_prompt_tokens: int, token_limit: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields that a request to `path` gets in place of the client's, and those of the client that it loses. Among
    them its tenant, for servers that separate what they cache by a salt, unless the operator has them go without. With
    a budget, also the limit that is left for each choice where the prompt has `num_prompt_tokens`. Raises
    InsufficientQuota or InvalidValue."""
    values = dict(upstream.fields)
    if head.stream and path in _STREAMS_WITH_OPTIONS:
        values = {"stream_options": {"include_usage": True}, **values}
    tenant = EVERYBODY if SALT in upstream.stripped_fields else head.tenant
    fields = ServerFields(path, values, tenant, upstream.stripped_fields, token_limit is not None)
    limit = None
    if token_limit is not None:
        num_choices = values.get("n")  # the operator's, in place of the client's
        if isinstance(num_choices, int) and num_choices > 0:
            head = msgspec.structs.replace(head, sampling=msgspec.structs.replace(head.sampling, n=num_choices))
        limit = within_limit(head, num_prompt_tokens, token_limit).sampling.max_tokens
    return fields.written(limit), fields.without


class _Response:
    """The sink of one response."""

    def __init__(self, is_stream: bool, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self.deliver: Deliver = lambda _: None
        self._read = ForeignResponse(is_stream=is_stream)

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:  # noqa: ARG002 - as Sink
        self._read.head(status, headers)

    @property
    def is_whole(self) -> bool:
        """Whether the response is not a stream."""
        return self._read.is_whole

    @property
    def is_rejected(self) -> bool:
        """Whether the server rejected it without work."""
        return 400 <= self._read.status < 500

    def chunk_receiver(self) -> None:
        """Every read is parsed."""

    def on_data(self, data: bytes) -> None:
        self._guarded(partial(self._read.feed, data))

    def on_end(self) -> None:
        error = self._read.error
        if isinstance(error, ModelNotFound):
            # The model exists; the path does not, or the name that the server knows it by is another one.
            self.fail(UpstreamUnavailable(error.message))
        self._guarded(self._read.finish)
        if not self.ended.done():
            self.ended.set_result(None)

    def on_fault(self, fault: UpstreamFault) -> None:
        self.fail(fault)

    def _guarded(self, decode: Callable[[], list[AnyEvent]]) -> None:
        """Never raises, because an exception would be blamed on the connection."""
        if self.ended.done():
            return
        try:
            if events := decode():
                self.deliver(events)
        except Exception as problem:  # noqa: BLE001 - `run` raises it
            self.fail(problem)

    def fail(self, problem: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(problem.with_traceback(None))
