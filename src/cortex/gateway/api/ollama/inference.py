"""Ollama's chat and generate: `keep_alive: 0` unloads the model after the response, or instead of one; other values
keep it for a while, if the operator permits that. `num_ctx` loads a model that is idle with more context, if there is
memory for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from cortex.fleet.topology import ModelOnNode
from cortex.gateway.dispatch.operator.commands import OperatorCommands
from cortex.gateway.ledger.keys import KeySection, may_use
from cortex.gateway.proxy.admission import ReceivedRequest
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.routes import JSON_HEADERS, InferenceRoute
from cortex.http.cross_site import CrossSiteCheck
from cortex.http.observer import Outcome
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.wire.dialects.openai_responses.kept import KeptResponse
from cortex.wire.errors import CortexError, CrossSiteRequest, ModelInUse, ModelNotAllowed, ModelNotFound, OperatorOnly

log = logging.getLogger(__name__)


class OllamaInference:
    """Serves the routes that generate. Only operators' keys may unload models; without keys, pages of other sites may
    not."""

    def __init__(self, inference: Inference, operator: OperatorCommands, cross_site: CrossSiteCheck) -> None:
        self._inference = inference
        self._operator = operator
        self._cross_site = cross_site

    def begin(self, exchange: Exchange, route: InferenceRoute) -> None:
        """Take over an exchange of `route`."""
        self._inference.receive(exchange, route, self._serve)

    def _serve(self, received: ReceivedRequest) -> None:
        summary = received.envelope.summary
        if summary.unloads and summary.loads_only:
            self._unload_only(received)
            return
        if summary.context_tokens:
            self._ask_for_context(received.key, summary.model, summary.context_tokens)
        keeper: _AfterResponse | None = None
        if summary.unloads:
            try:
                self._check_operator(received)
                keeper = _AfterResponse(partial(self._unload_idle, summary.model))
            except (OperatorOnly, CrossSiteRequest) as error:
                log.debug("%s stays loaded after a response: %s", summary.model, error)
        elif summary.keep_alive_s and self._inference.services.dispatcher.fleet.rules.max_keep_alive_s:
            keeper = _AfterResponse(partial(self._keep, summary.model, summary.keep_alive_s))
        self._inference.serve(received, keeper)

    def _ask_for_context(self, key: KeySection | None, name: str, tokens: int) -> None:
        """Reload the model with that context if possible; the request then waits for it."""
        dispatcher = self._inference.services.dispatcher
        try:
            model = dispatcher.resolve(name).model_id
        except ModelNotFound:
            return  # its own error follows
        if may_use(key, model):
            dispatcher.ask_for_context(model, tokens, is_operator=key is None or key.operator)

    def _keep(self, name: str, keep_alive_s: float) -> None:
        """Keep the model after a response, within the operator's limit."""
        dispatcher = self._inference.services.dispatcher
        limit_s = dispatcher.fleet.rules.max_keep_alive_s
        kept_s = limit_s if keep_alive_s < 0 else min(keep_alive_s, limit_s)
        try:
            dispatcher.keep(dispatcher.resolve(name).model_id, kept_s)
        except ModelNotFound:
            log.debug("%s is gone", name)

    def _check_operator(self, received: ReceivedRequest) -> None:
        """Raises OperatorOnly or CrossSiteRequest where the client may not unload."""
        if received.key is None:
            host = received.exchange.request.header(b"host")
            self._cross_site.check_host(None if host is None else host.decode("latin-1"))
        elif not received.key.operator:
            raise OperatorOnly("Only an operator's key unloads models; leave keep_alive out.")

    def _unload_only(self, received: ReceivedRequest) -> None:
        name = received.envelope.summary.model
        try:
            self._check_operator(received)
            self._inference.services.dispatcher.resolve(name)  # raises ModelNotFound
        except CortexError as error:
            self._inference.reject(received, error)
            return
        self._unload_idle(name)
        body = received.route.state_reply(name, unloads=True)
        received.span.end({})
        received.exchange.respond(200, (*JSON_HEADERS, *received.route.id_headers(received.id)), body)

    def _unload_idle(self, name: str) -> None:
        """Unload the model unless it is pinned, or other requests use or await it; on sleeping nodes it stays."""
        dispatcher = self._inference.services.dispatcher
        try:
            model = dispatcher.resolve(name).model_id
            in_use = {
                target.node for target, number in dispatcher.in_flight.items() if number and target.model == model
            }
            if dispatcher.queue_depths.get(model):
                return
            for node in self._operator.targets_of_unload(model):
                stays = node in in_use or self._operator.is_pinned(ModelOnNode(node, model))
                if not stays and dispatcher.why_away(node) is None:
                    self._operator.unload(model, node)
        except (ModelNotFound, ModelInUse, ModelNotAllowed):
            log.debug("%s was not unloaded", name)


class _AfterResponse:
    """A `ResponseKeeper` that keeps nothing and calls `then` after a response without an error."""

    kept: KeptResponse | None = None
    headers: Headers = ()
    capture: Callable[[bytes], None] | None = None

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def ended(self, status: int, outcome: Outcome) -> None:  # noqa: ARG002
        if status == 200:
            self._then()
