"""The body that a node gets: the client's bytes, with a few fields changed, or a translation.

Neurons get the token limit and the tenant of a request in headers. Foreign servers do not read these: the limit of one
choice is written into their body, and so is the tenant, if they read it there. They get the body as it was parsed here
(`foreign/body.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from cortex.foreign.body import Access, ServerBody, ServerFields, server_body
from cortex.foreign.embeddings import OllamaEmbeddings
from cortex.gateway.dispatch.leases import Lease
from cortex.gateway.ledger.meter import Reservation
from cortex.gateway.proxy.admission import AdmittedRequest, ReceivedRequest, ResponseKeeper, narrowed_tenant
from cortex.gateway.proxy.redaction import shown_of_stream
from cortex.gateway.proxy.routes import CHAT
from cortex.gateway.proxy.translation import ChatTranslation
from cortex.http.composed_body import Body
from cortex.http.opaque_request import passed_headers, target_of, written
from cortex.http.request import Headers, Request
from cortex.parsing.cost import is_edited_elsewhere, is_parsed_elsewhere
from cortex.parsing.functions import edit_fields, translated
from cortex.parsing.parser import BodyParser
from cortex.wire.dialects.ollama.embeddings import embed_request
from cortex.wire.errors import InsufficientQuota
from cortex.wire.fields.body import replace_fields
from cortex.wire.fields.request_class import PRIORITY, TIER
from cortex.wire.opaque.fields import OpaqueFields
from cortex.wire.opaque.routes import upstream_path
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest
from cortex.wire.tenant import EVERYBODY


class OpaqueBody:
    """The same for every attempt, except for the path below `/upstream/`: a foreign server is the upstream itself."""

    __slots__ = ("_access", "_body", "_form", "_is_foreign", "_own_target", "_target", "_upstream", "headers", "method")

    def __init__(self, request: Request, model: str, found: OpaqueFields | str, access: Access = "any") -> None:
        """`found`: its known fields or, for a request below `/upstream/`, the path at the server. `access`: the fields
        that a foreign server may get."""
        self._access = access
        self._is_foreign = False
        self.method = request.method
        self.headers: Headers = ()
        self._body: Body = b""
        self._own_target = self._target = b""
        self._upstream: bytes | None = None
        """The target at one of our nodes, for a request below `/upstream/`."""
        self._form = None if isinstance(found, str) else (request, model, found)
        if isinstance(found, str):
            self._own_target = target_of(found.encode("latin-1"), request.query)
            self._upstream = target_of(upstream_path(model, found).encode("latin-1"), request.query)
            self.headers = passed_headers(request)
            self._body = request.body if request.upload is None else request.upload

    def choose(self, lease: Lease) -> bool:
        self._is_foreign = not lease.abilities.reads_headers
        if self._form is not None:
            request, model, found = self._form
            values, stripped = {**lease.abilities.set_params, "model": model}, lease.abilities.strip_params
            self._own_target, self.headers, self._body = written(request, found, values, stripped)
        self._target = self._own_target  # the attempt before may have been at a node of the other kind
        if self._upstream is not None and lease.abilities.reads_headers:
            self._target = self._upstream
        return True

    async def prepare(self, parser: BodyParser) -> None:
        """Nothing has to be prepared."""

    def made(self) -> tuple[bytes, Body, None]:
        """Raises InvalidValue for a field that the key may not send to a foreign server."""
        if self._is_foreign and self._access != "any" and self._form is not None:
            self._form[2].check_known()
        return self._target, self._body, None


_JSON = (b"content-type", b"application/json")
_STREAM: Headers = (_JSON, (b"accept", b"text/event-stream"))
_WHOLE: Headers = (_JSON, (b"accept", b"application/json"))


class OutgoingBody:
    """One per request. For each attempt call `choose`, then `prepare` if that is needed, then `made`."""

    __slots__ = (
        "_access",
        "_admitted",
        "_beyond",
        "_edited",
        "_has_budget",
        "_is_foreign",
        "_keeper",
        "_limits",
        "_received",
        "_request",
        "_route",
        "_served",
        "_set_params",
        "_strip_params",
        "_tenant",
        "_translated",
        "_translates",
        "headers",
    )
    method = b"POST"

    def __init__(self, received: ReceivedRequest, admitted: AdmittedRequest, keeper: ResponseKeeper | None) -> None:
        self._request = received
        self._route = received.route
        self._received = received.body
        self._admitted = admitted
        self._keeper = keeper
        self.headers: Headers = _STREAM if self._route.generates and received.envelope.summary.stream else _WHOLE
        """Headers for the node about the body and the response."""
        self._has_budget = self._route.need != "relay" and admitted.reservation.token_limit is not None
        self._access = access_of(admitted, is_counted=self._has_budget)
        self._is_foreign = False
        self._translates = False
        """Whether the body is translated."""
        self._tenant = EVERYBODY
        """The tenant that is written into the body."""
        self._set_params: dict[str, Any] = {}
        self._strip_params: tuple[str, ...] = ()
        """The fields that the operator sets and removes at the node."""
        asked = received.envelope.summary.asked_class
        self._beyond = (TIER, PRIORITY) if asked is not None and asked != admitted.request_class else ()
        """Fields that ask for more than the key may have: a foreign server gets none of them."""
        self._limits: dict[int, int | None] = {}
        """The limit of a choice at a foreign server, by the tokens of the prompt there."""
        is_renamed = received.envelope.summary.model != admitted.model  # the client named it by an alias
        self._edited: bytes | None = None if is_renamed or self._route.target else received.body
        """The body for neurons, or for the target of another path, once made."""
        self._served: ServerBody | None = None
        """The body for a foreign server, if it is not translated, once made."""
        self._translated: tuple[GenerateRequest, ServerBody] | None = None

    def choose(self, lease: Lease) -> bool:
        """Choose the form for the node of `lease`; False: call `prepare` before `made`."""
        route, body = self._route, self._received
        self._is_foreign = not lease.abilities.reads_headers
        filters = lease.abilities.set_params, (*lease.abilities.strip_params, *self._beyond)
        if filters != (self._set_params, self._strip_params):
            (self._set_params, self._strip_params), self._served, self._translated = filters, None, None
        self._translates = route.generates and route.dialect not in lease.abilities.dialects
        if route.target:
            return self._edited is not None or not is_parsed_elsewhere(body)
        is_salted = lease.abilities.reads_salt and route.generates
        tenant = narrowed_tenant(self._request, self._admitted) if is_salted else EVERYBODY
        if tenant != self._tenant:
            self._tenant, self._served, self._translated = tenant, None, None
        if self._translates:
            return self._translated is not None or not is_parsed_elsewhere(body)
        if self._is_foreign:
            return self._served is not None or not is_parsed_elsewhere(body)
        return self._edited is not None or not is_edited_elsewhere(body)

    async def prepare(self, parser: BodyParser) -> None:
        """Make a body that would block the loop in another process. Raises CortexError for an invalid one."""
        key, exchange = self._admitted.key, self._request.exchange
        client = key.id if key is not None else exchange.request.client  # that shares the parser with others
        body, model = self._received, self._admitted.model
        if self._route.target:
            self._edited = await parser.run(embed_request, model, body=body, client=client)
        elif self._translates:
            request, made = await parser.translate(self._route.dialect, body, model, client, tenant=self._tenant)
            if self._is_filtered:
                made = await parser.run(
                    server_body, self._path, self._fields.without, "any", body=made.body, client=client
                )
            self._translated = request, made
        elif self._is_foreign:
            arguments = self._path, self._fields.without, self._access
            self._served = await parser.run(server_body, *arguments, body=body, client=client)
        else:
            self._edited = await parser.run(edit_fields, {"model": model}, body=body, client=client)

    def made(self) -> tuple[bytes, bytes, ChatTranslation | OllamaEmbeddings | None]:
        """The path, the body, and the translation of the response. Raises CortexError for an invalid body, including
        InsufficientQuota if the budget is too small for a foreign server, which takes no limit on prompt tokens."""
        model = self._admitted.model
        if self._route.target:
            body = self._edited = self._edited or embed_request(model, self._received)
            self._foreign_limit(len(body))
            if self._is_filtered:
                fields = self._fields
                body = server_body(fields.path, fields.without, "any", body).with_fields(fields.written(None))
            translation = OllamaEmbeddings(self._route.path.decode(), self._request.envelope.summary.model)
            return self._route.target, body, translation
        if self._translates:
            return CHAT.path, *self._translation()
        if self._is_foreign:
            fields = self._fields
            if self._served is None:
                self._served = server_body(fields.path, fields.without, self._access, self._received)
            limit = self._foreign_limit(len(self._served.body))
            written = fields.written(limit if fields.is_limited else None)
            return self._route.path, self._served.with_fields(written), None
        if self._edited is None:
            self._edited = replace_fields(self._received, {"model": model})
        return self._route.path, self._edited, None

    @property
    def _path(self) -> str:
        """The path of the request that the node gets."""
        return (CHAT.path if self._translates else self._route.target or self._route.path).decode()

    @property
    def _is_filtered(self) -> bool:
        return bool(self._set_params or self._strip_params)

    @property
    def _fields(self) -> ServerFields:
        """The fields that a foreign server gets instead of the client's."""
        is_limited = self._has_budget and self._route.generates
        values = {**self._set_params, "model": self._admitted.model}
        return ServerFields(self._path, values, self._tenant, self._strip_params, is_limited)

    def _foreign_limit(self, num_bytes: int) -> int | None:
        """The limit of a choice at a foreign server for a body of this size; None without a limit."""
        if not (self._is_foreign and self._has_budget):
            return None
        summary = self._request.envelope.summary
        # The outgoing body may be longer than the received one, except for the encoding of pictures.
        most = max(num_bytes, len(self._received)) - summary.picture_bytes + summary.picture_tokens
        if most not in self._limits:
            self._limits[most] = choice_limit(self._admitted.reservation, summary, most)
        return self._limits[most]

    def _translation(self) -> tuple[bytes, ChatTranslation]:
        if self._translated is None:
            request = self._route.codec.parse(self._received)
            made = ServerBody(translated(request, self._admitted.model, self._tenant))
            if self._is_filtered:
                made = server_body(self._path, self._fields.without, "any", made.body)
            self._translated = request, made
        request, served = self._translated
        if request.echoes_tier:
            request = msgspec.structs.replace(request, request_class=self._admitted.request_class)
        own_limit = None if "max_tokens" in self._strip_params else request.sampling.max_tokens
        limits = (own_limit, self._foreign_limit(len(served.body)))
        limit = min((each for each in limits if each is not None), default=None)
        if self._is_filtered:
            body = served.with_fields(self._fields.written(limit))
        else:
            body = served.with_fields({} if limit is None else {"max_tokens": limit})
        response_id = self._route.codec.id_prefix + self._request.id.decode().removeprefix("req_")
        if self._keeper is not None and self._keeper.kept is not None:
            request, response_id = self._keeper.kept.described(request), self._keeper.kept.id
        name = self._request.envelope.summary.model
        show = partial(shown_of_stream, self._admitted.key, self._admitted.model, name)
        return body, ChatTranslation(self._route, request, id=response_id, model=name, show=show)


def access_of(admitted: AdmittedRequest, *, is_counted: bool) -> Access:
    """Which fields the key may send to a foreign server: fields unknown here could choose another model, use uncounted
    tokens, or ask for more pictures than are charged. `is_counted`: whether its tokens are counted for a budget."""
    if is_counted:
        return "counted"
    has_models = admitted.key is not None and bool(admitted.key.models)
    return "known" if has_models or admitted.reservation.token_limit is not None else "any"


MOST_UNASKED_TOKENS = 16_384
"""The limit of a choice whose client sets none, even if the budget has more: servers reject limits beyond their
context, and many do not report it."""


def choice_limit(reservation: Reservation, summary: RequestSummary, most_prompt_tokens: int) -> int | None:
    """The token limit of one choice at a server that takes no limit for the whole request; None without a budget, or if
    the model's context ends a choice before the budget does. The prompt counts as one token per byte, its upper bound.
    Raises InsufficientQuota."""
    prompt_tokens = reservation.max_prompt_tokens(most_prompt_tokens)
    try:
        limit = reservation.extend(prompt_tokens)
    except InsufficientQuota as error:
        counted = f"At this server the prompt counts as {prompt_tokens} tokens, one for each byte."
        raise InsufficientQuota(f"{error.message} {counted}", retry_after_s=error.retry_after_s) from error
    if limit is None:
        return None
    if not reservation.may_end_response:  # the budget covers all that the client's limit or the context allows
        return summary.completion_limit
    left = (limit - prompt_tokens) // summary.num_choices
    return min(left, MOST_UNASKED_TOKENS if summary.completion_limit is None else summary.completion_limit)
