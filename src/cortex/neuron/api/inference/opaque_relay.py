"""Relays a request to the server of its model, and the response back, unread."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from cortex.http.head import ABOUT_CONTENT
from cortex.http.observer import ObservedRelay, Outcome
from cortex.http.opaque_request import WrittenRequest, passed_headers
from cortex.http.relay import Relay
from cortex.http.request import Headers
from cortex.http.routing import routed_path
from cortex.http.ticker import Ticker
from cortex.http.upstream.faults import UpstreamFault, UpstreamSilent
from cortex.neuron.api import bodies
from cortex.neuron.api.calls import ApiCall
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.server_slot import NoSlot, ServerSlot
from cortex.neuron.api.inference.session import ready
from cortex.neuron.api.metrics import RequestWatch
from cortex.neuron.node.harness.harness import Upstream
from cortex.neuron.node.node import Node
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import CortexError, UpstreamInterrupted
from cortex.wire.fields.request_class import level_of
from cortex.wire.node import headers as our_headers
from cortex.wire.node.protocol import ModelState
from cortex.wire.opaque.routes import not_ready

_JSON = (b"content-type", b"application/json")
_RELAYED: Headers = ((our_headers.RELAYED.encode(), b"1"),)


@dataclass(frozen=True, slots=True)
class OpaqueRelay:
    """Shared by all such requests."""

    backend: Node
    drain_gate: DrainGate
    ticker: Ticker

    async def pass_on_json(
        self, call: ApiCall, model: str, body: bytes, upstream: Upstream, watch: RequestWatch
    ) -> None:
        """As `pass_on`, to the path of the request."""
        headers = [*(pair for pair in passed_headers(call.request) if pair[0] != _JSON[0]), _JSON]
        await self.pass_on(call, model, WrittenRequest(routed_path(call.request), headers, body), upstream, watch)

    async def pass_on(
        self,
        call: ApiCall,
        model: str,
        sent: WrittenRequest,
        upstream: Upstream,
        watch: RequestWatch,
        *,
        is_check: bool = False,
        passed_headers: Collection[bytes] | None = ABOUT_CONTENT,
    ) -> None:
        """Loads the model, waits for a slot, and relays request and response, unread unless the call translates.
        `is_check`: a health check, which loads nothing and waits for no slot. `passed_headers`: see `Relay.send`."""
        http = call.request
        if is_check and self.backend.served(model).state is not ModelState.READY:
            raise not_ready(model)
        watch.phase = lambda: "load"
        arrived_s = time.monotonic()
        principal = bodies.principal_of(http)
        await self.drain_gate.wait_for(ready(self.backend, model, is_of_gateway=bool(principal)))
        watch.phase = lambda: "prefill"
        id = f"opaque-{uuid.uuid4().hex}"
        slot: ServerSlot | NoSlot = NoSlot()
        if not is_check:
            slot = ServerSlot(self.backend, model, id, principal, level_of(bodies.class_of(http)))
        response = _Response(asyncio.get_running_loop().create_future())
        relay = Relay(call.exchange, response, self.ticker, None, _RELAYED)
        try:
            await slot.wait()
            slot.on_lost = response.fail
            call.load_s = time.monotonic() - arrived_s
            translation = None if call.translate is None else call.translate(model)
            request = http.method, sent.target, sent.headers, sent.body
            relay.send(upstream.pool(), *request, translation, passed_headers=passed_headers)
            try:
                await response.ended
            except UpstreamFault as fault:
                if isinstance(fault, UpstreamSilent):
                    await upstream.end_if_hung(str(fault))
                slot.release()  # the server may live, and others wait for it
                await upstream.check_lost()
                raise UpstreamInterrupted(f"The model's server failed: {fault}; try again.") from fault
            if response.error is not None:
                watch.failed(response.error)
            if not is_check:
                upstream.finished(id, 0, 0)
        finally:
            relay.drop()
            slot.release()


class _Response:
    """The observer of one relay. Its end is a future."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self.error: CortexError | None = None
        """The error that ended a response after it had begun."""

    def fail(self, problem: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(problem.with_traceback(None))

    def on_head(self, relay: ObservedRelay, status: int, headers: Headers) -> bool:  # noqa: ARG002 - as Observer
        return True

    def on_first_data(self, relay: ObservedRelay) -> None: ...

    def on_fault(self, relay: ObservedRelay, fault: UpstreamFault) -> None:  # noqa: ARG002 - as Observer
        self.fail(fault)

    def late_response(self, relay: ObservedRelay, status: int, body: bytes) -> bytes:  # noqa: ARG002 - as Observer
        return b""

    def interruption(self, relay: ObservedRelay, fault: UpstreamFault) -> bytes:  # noqa: ARG002 - as Observer
        self.error = UpstreamInterrupted(f"The model's server failed in the middle of its response: {fault}.")
        return DIALECTS["openai_chat"].stream_error(self.error)

    def on_done(self, relay: ObservedRelay, outcome: Outcome) -> None:  # noqa: ARG002 - as Observer
        if not self.ended.done():
            self.ended.set_result(None)
