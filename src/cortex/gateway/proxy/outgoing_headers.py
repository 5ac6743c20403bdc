"""The headers of a request to a node, and those that the gateway adds to its response."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote

from cortex.foreign.embeddings import ASKED
from cortex.gateway.dispatch.leases import Lease
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.nodes.neighbours import reaches
from cortex.gateway.proxy.accounting.request_accounting import RequestAccounting
from cortex.gateway.proxy.admission import AdmittedRequest, ResponseKeeper
from cortex.gateway.proxy.redaction import hides_details
from cortex.gateway.proxy.routes import InferenceRoute
from cortex.http.request import Headers
from cortex.wire.dialects.openai_responses import kept
from cortex.wire.node import kv_blocks
from cortex.wire.node.headers import (
    ATTEMPT_ID,
    BUDGET,
    CLASS,
    ERROR_DETAILS,
    FIELDS,
    KNOWN_FIELDS,
    NO_DETAILS,
    NODE,
    PRINCIPAL,
    TENANT,
    TOKEN_LIMIT,
    WAITED,
)
from cortex.wire.opaque.routes import SAFE_HEADERS

log = logging.getLogger(__name__)

_PRINCIPAL = PRINCIPAL.encode()
_CLASS = CLASS.encode()
_TENANT = TENANT.encode()
_ATTEMPT = ATTEMPT_ID.encode()
_NODE = NODE.encode()
_NO_DETAILS = (ERROR_DETAILS.encode(), NO_DETAILS.encode())
_KNOWN_FIELDS = (FIELDS.encode(), KNOWN_FIELDS.encode())
_KEPT = kept.HEADER.encode()
_WAITED = WAITED.encode()
_TOKEN_LIMIT = TOKEN_LIMIT.encode()
_BUDGET = BUDGET.encode()
_KV_SOURCE = kv_blocks.SOURCE.encode()
_SAFE: Headers = tuple((name.encode(), value.encode()) for name, value in SAFE_HEADERS.items())


def for_node(
    lease: Lease,
    route: InferenceRoute,
    admitted: AdmittedRequest,
    accounting: RequestAccounting,
    keeper: ResponseKeeper | None,
    traceparent: bytes | None,
) -> Headers:
    """The headers for a node. A foreign server gets neither the principal nor anything else that is only for
    neurons."""
    reservation = admitted.reservation
    headers: Headers = ((b"x-request-id", accounting.received.id),)
    if not lease.abilities.reads_headers:
        return headers if traceparent is None else (*headers, (b"traceparent", traceparent))
    headers = (
        *headers,
        (_ATTEMPT, accounting.attempt_id),
        (_PRINCIPAL, header_value(reservation.principal)),
    )
    if admitted.request_class != "default" or accounting.received.envelope.summary.asked_class is not None:
        headers = (*headers, (_CLASS, admitted.request_class.encode()))
    if admitted.tenant:
        headers = (*headers, (_TENANT, admitted.tenant.hex().encode()))
    if keeper is not None and keeper.kept is not None:
        headers = (*headers, (_KEPT, keeper.kept.header_value.encode()))
    if route.reports_durations:
        headers = (*headers, (_WAITED, b"%d" % (1000 * accounting.held_s)))
    if reservation.token_limit is not None:
        headers = (*headers, (_TOKEN_LIMIT, b"%d" % reservation.token_limit))
    if route.need == "embeddings":
        headers = (*headers, *ASKED)
    if admitted.key is not None and admitted.key.models:
        headers = (*headers, _KNOWN_FIELDS)
    if hides_details(admitted.key):
        headers = (*headers, _NO_DETAILS)
    return headers if traceparent is None else (*headers, (b"traceparent", traceparent))


def kv_source(lease: Lease, nodes: Mapping[str, NodeClient]) -> Headers:
    """Where the node finds KV of the prompt that another node has computed. Empty if it cannot reach that node, or if
    the certificates are too long for a header."""
    source = nodes.get(lease.kv_source)
    if source is None or not lease.abilities.reads_headers or source.section.kind != "neuron":
        return ()
    if not reaches(nodes[lease.node].section.endpoint, source.section.endpoint):
        return ()
    try:
        value = kv_blocks.source_header(source.as_neighbour(kv_blocks.SCOPE))
        return ((_KV_SOURCE, value),) if len(value) <= kv_blocks.MAX_SOURCE_BYTES else ()
    except OSError as error:
        log.warning("%s cannot be named as a source of KV: %s", source.name, error)
        return ()


def for_client(lease: Lease, route: InferenceRoute, admitted: AdmittedRequest, *, names_node: bool) -> Headers:
    """Headers that are added to a node's response."""
    is_named = names_node and (admitted.key is None or admitted.key.sees_nodes)
    ours: Headers = ((_NODE, header_value(lease.node)),) if is_named else ()
    reservation = admitted.reservation
    if reservation.token_limit is not None and reservation.may_end_response:
        ours = (*ours, (_BUDGET, b"%d tokens" % reservation.token_limit))
    return (*ours, *_SAFE) if route.need == "relay" else ours


@lru_cache(maxsize=4096)
def header_value(text: str) -> bytes:
    """`text`, any name that an operator chose, as a safe header value."""
    return quote(text, safe=" @._-").encode()
