"""Admission: what every inference request must pass before it may ask the dispatcher for a lease.

The checks have a fixed order: the key, from the headers alone; then the body; then the key's limits; then the model's
name. No check whose cost depends on the request runs before the key is known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from cortex.fleet.catalogue import ModelSpec, Resolution, near_misses
from cortex.fleet.placement.decision import Origin
from cortex.gateway.dispatch.view import DispatchView
from cortex.gateway.ledger.keys import KeySection, PrefixSharing, check_model, class_of_key, may_use, tenant_of_key
from cortex.gateway.ledger.meter import Meter, Reservation
from cortex.gateway.proxy.redaction import shown_to
from cortex.gateway.proxy.routes import InferenceRoute
from cortex.http.observer import Outcome
from cortex.http.request import Headers, Request
from cortex.http.server.exchange import Exchange
from cortex.parsing.envelope import Envelope
from cortex.telemetry.spans import Span
from cortex.wire.dialects.openai_responses.kept import KeptResponse
from cortex.wire.errors import CortexError, ModelNotAllowed, ModelNotFound, Overloaded, shorten
from cortex.wire.fields.request_class import RequestClass
from cortex.wire.request_summary import RequestSummary
from cortex.wire.tenant import EVERYBODY, tenant_of

_NODE_START_S = 2.0
"""Retry delay for a model that only nodes name, while some are still starting."""


def client_of(key: KeySection | None, request: Request) -> str:
    """The unit of fairness between clients: a key, or the address of a client without one."""
    return key.id if key is not None else request.client


class IdleWork(Protocol):
    """A request that can wait, such as a line of a batch. It evicts nothing, and its batch charges for it."""

    @property
    def reservation(self) -> Reservation: ...
    @property
    def avoided(self) -> frozenset[str]:
        """Nodes that have enough idle work."""

    def sent_to(self, node: str) -> None:
        """It is about to be sent to a node, perhaps after another one failed."""


_UNREAD = Envelope(RequestSummary("", stream=False, completion_limit=0, num_choices=1), ())


class ReceivedRequest(msgspec.Struct):
    """A request before it is admitted. Complete, and not changed any more, once its body was read."""

    exchange: Exchange
    route: InferenceRoute
    id: bytes
    span: Span
    received_at: float
    """When all of its bytes had arrived."""
    key: KeySection | None = None
    """None on an open gateway."""
    body: bytes = b""
    envelope: Envelope = _UNREAD
    idle: IdleWork | None = None

    @property
    def client(self) -> str:
        return client_of(self.key, self.exchange.request)


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that passed all checks: its model, and the reservation that it is charged to."""

    model: str
    origin: Origin
    reservation: Reservation
    key: KeySection | None = None
    """The key of its client; None on an open gateway."""
    is_check: bool = False
    """Whether it is a health check: it counts against no limit or budget, and loads no model."""
    tenant: bytes = EVERYBODY
    """The clients with which its client shares cached prefixes."""
    request_class: RequestClass = "default"
    """Its priority over other requests."""

    @property
    def is_idle(self) -> bool:
        """Whether no one waits for it, as for a line of a batch."""
        return self.request_class == "idle"


def narrowed_tenant(received: ReceivedRequest, admitted: AdmittedRequest) -> bytes:
    """Requests share cached prefixes if they have the same tenant and salt."""
    return tenant_of(admitted.tenant, received.envelope.summary.cache_salt)


class AdmissionController:
    """Authenticates and admits requests. Called on the loop's thread; never waits."""

    def __init__(self, dispatcher: DispatchView, meter: Meter, prefix_sharing: PrefixSharing) -> None:
        self._dispatcher = dispatcher
        self._context_of, self._prices_of = dispatcher.context_tokens, dispatcher.cost
        self.meter = meter
        """Replaced by a reload; running requests settle with the meter that admitted them."""
        self.prefix_sharing = prefix_sharing
        """Replaced by a reload."""

    def admit(
        self,
        key: KeySection | None,
        prompt_bytes: int,
        summary: RequestSummary,
        *,
        has_price: bool = False,
        is_check: bool = False,
        idle: IdleWork | None = None,
    ) -> AdmittedRequest:
        """Reserve what a request of `key` may use and resolve its model. Raises the `CortexError` that rejects it.

        `has_price`: the catalogue's prices apply to its tokens. `is_check`: see `AdmittedRequest`."""
        found = self._find(key if idle is None else idle.reservation.key, summary.model)
        reservation = Reservation(key) if idle is None else idle.reservation
        if not is_check and idle is None:
            reservation = self._reserve(key, prompt_bytes, summary, found, has_price=has_price)
        try:
            if isinstance(found, CortexError):
                raise found
            model = found.model_id
            if summary.has_pictures:
                self.check_pictures(key, model)
        except CortexError as error:
            reservation.cancel()
            raise shown_to(key, self._until_nodes_report(error, summary.model)) from error
        served = class_of_key(key, summary.asked_class) if idle is None else "idle"
        # Idle work evicts no model for itself.
        origin: Origin = "background" if found.background or served == "idle" else "request"
        tenant = tenant_of_key(key, self.prefix_sharing)
        return AdmittedRequest(model, origin, reservation, key, is_check, tenant, served)

    def _find(self, key: KeySection | None, name: str) -> Resolution | ModelNotAllowed | ModelNotFound:
        """The model, or why there is none: the key's limits come first."""
        try:
            return resolve_for(self._dispatcher, key, name)
        except (ModelNotAllowed, ModelNotFound) as error:
            return error

    def _reserve(
        self,
        key: KeySection | None,
        prompt_bytes: int,
        summary: RequestSummary,
        found: Resolution | CortexError,
        *,
        has_price: bool,
    ) -> Reservation:
        """Treats a model that the key may not use as unknown: an error must not reveal its price or context."""
        if isinstance(found, CortexError):
            prompt_tokens = ModelSpec(id=summary.model).price_of(summary.num_choices) if has_price else None
            return self.meter.admit(key, prompt_bytes, summary, prompt_tokens=prompt_tokens)
        prompt_tokens = self._dispatcher.spec(summary.model).price_of(summary.num_choices) if has_price else None
        return self.meter.admit(key, prompt_bytes, summary, self._context_of, self._prices_of, prompt_tokens)

    def _until_nodes_report(self, error: CortexError, name: str) -> CortexError:
        """In place of a `ModelNotFound` while nodes are starting: one of them may have the model."""
        starting = self._dispatcher.starting_nodes
        if not starting or not isinstance(error, ModelNotFound):
            return error
        return Overloaded(
            f"There is no model `{shorten(name)}` yet: {', '.join(starting)} may have it and has not responded since "
            "this gateway started; try again in a moment.",
            retry_after_s=_NODE_START_S,
        )

    def check_pictures(self, key: KeySection | None, model: str) -> None:
        """Raises UnsupportedModality for a model that reads text only; the error suggests models of `key` that read
        pictures."""
        self._dispatcher.check_pictures(model, partial(may_use, key))


def resolve_for(dispatcher: DispatchView, key: KeySection | None, name: str) -> Resolution:
    """The model that the owner of `key` means. The result for a key with a list of models depends on its list alone, so
    that it does not reveal other models. Raises ModelNotAllowed for a name beyond the list, ModelNotFound for others.
    """
    if key is None or not key.models:
        return dispatcher.resolve(name)
    try:
        resolution = dispatcher.resolve(name)
        if may_use(key, resolution.model_id):
            return resolution
    except ModelNotFound:
        pass
    check_model(key, name)
    fleet = dispatcher.fleet
    misses = near_misses(name, (each for each in (*fleet.catalogue.ids, *fleet.live_models()) if may_use(key, each)))
    advice = f"did you mean {' or '.join(f'`{miss}`' for miss in misses)}?" if misses else "GET /v1/models lists yours."
    message = f"There is no model `{shorten(name)}` for this key: {advice}"
    raise ModelNotFound(message, param="model", details={"near_misses": list(misses)})


def resolve_listed(dispatcher: DispatchView, key: KeySection | None, name: str, listing: str) -> Resolution:
    """The same for a route about models, where a key with a list sees no others. Raises ModelNotFound, which names the
    route `listing`."""
    try:
        return resolve_for(dispatcher, key, name)
    except (ModelNotAllowed, ModelNotFound):
        if key is None or not key.models:
            raise
        raise ModelNotFound(
            f"There is no such model for this key; GET {listing} lists those that it may use."
        ) from None


class ResponseKeeper(Protocol):
    """Keeps the response to a request, for later requests that refer to it."""

    @property
    def kept(self) -> KeptResponse | None:
        """Fields about the stored response for the request to the node; None if the response is not stored."""

    @property
    def headers(self) -> Headers:
        """Headers for the client."""

    @property
    def capture(self) -> Callable[[bytes], None] | None:
        """Receives what the client receives; see `Relay`."""

    def ended(self, status: int, outcome: Outcome) -> None:
        """The response has ended; called once, last."""
