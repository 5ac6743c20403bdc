"""Ollama's chat and generate: `keep_alive: 0` unloads the model after the response, or instead of one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from cortex.fleet.topology import ModelOnNode
from cortex.gateway.dispatch.operator.commands import OperatorCommands
from cortex.gateway.proxy.inference import Inference, ReceivedRequest
from cortex.gateway.proxy.routes import JSON_HEADERS, Route
from cortex.http.observer import Outcome
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.wire.dialects.openai_responses.kept import KeptResponse
from cortex.wire.errors import CortexError, ModelInUse, ModelNotAllowed, ModelNotFound, OperatorOnly

log = logging.getLogger(__name__)


class OllamaInference:
    """Serves the routes that generate. Whom a model may be taken from is a matter of operators: other keys do not
    unload it."""

    def __init__(self, inference: Inference, operator: OperatorCommands) -> None:
        self._inference = inference
        self._operator = operator

    def begin(self, exchange: Exchange, route: Route) -> None:
        """Take over an exchange of `route`."""
        self._inference.receive(exchange, route, self._serve)

    def _serve(self, received: ReceivedRequest) -> None:
        facts = received.envelope.facts
        if facts.unloads and facts.loads_only:
            self._unload_only(received)
            return
        may_unload = facts.unloads and (received.key is None or received.key.operator)
        ended = partial(self._unload_idle, facts.model) if may_unload else None
        self._inference.serve(received, None if ended is None else _AfterResponse(ended))

    def _unload_only(self, received: ReceivedRequest) -> None:
        name = received.envelope.facts.model
        try:
            if received.key is not None and not received.key.operator:
                raise OperatorOnly("Only an operator's key unloads models; leave keep_alive out.")
            model = self._inference.services.dispatcher.resolve(name).model_id
            try:
                self._operator.unload(model)
            except ModelNotFound:
                pass  # it is loaded nowhere
        except CortexError as error:
            self._inference.reject(received, error)
            return
        body = received.route.state_reply(name, unloads=True)
        received.span.end({})
        received.exchange.respond(200, (*JSON_HEADERS, *received.route.id_headers(received.id)), body)

    def _unload_idle(self, name: str) -> None:
        """Unload the model unless it is pinned, or other requests use or await it."""
        dispatcher = self._inference.services.dispatcher
        try:
            model = dispatcher.resolve(name).model_id
            in_use = {
                target.node for target, number in dispatcher.in_flight.items() if number and target.model == model
            }
            if dispatcher.queue_depths.get(model):
                return
            for node in self._operator.targets_of_unload(model):
                if node not in in_use and not self._operator.is_pinned(ModelOnNode(node, model)):
                    self._operator.unload(model, node)
        except (ModelNotFound, ModelInUse, ModelNotAllowed):
            log.debug("%s was not unloaded after a response", name)


class _AfterResponse:
    """A `ResponseKeeper` that keeps nothing."""

    kept: KeptResponse | None = None
    headers: Headers = ()
    capture: Callable[[bytes], None] | None = None

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def ended(self, status: int, outcome: Outcome) -> None:  # noqa: ARG002
        self._then()
