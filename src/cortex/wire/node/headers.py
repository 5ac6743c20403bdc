"""Our own headers between gateway, nodes and clients."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from cortex.wire.errors import MAX_ECHO
from cortex.wire.requests import GenerateRequest

PRINCIPAL = "x-cortex-principal"
"""The authenticated client of a request. Only a gateway sets it."""

TENANT = "x-cortex-tenant"
"""The tenant, the clients with which a request shares cached prefixes, as a hex digest; absent: shared with all others
that have none. Only a gateway sets it."""

CLASS = "x-cortex-class"
"""The class that a request is served in (`wire/fields/request_class.py`); absent: `default`. Only a gateway sets it."""

ATTEMPT_ID = "x-cortex-attempt-id"
"""Names one attempt at a request, for `GET /requests/{id}/usage`. Only a gateway sets it, and clients never see it: two
requests may have the same `x-request-id`, which clients choose."""

ERROR_DETAILS = "x-cortex-error-details"
"""`none`: the client is not an operator, so that error events inside a stream must not name nodes, files and models.
Only a gateway sets it."""
NO_DETAILS = "none"

FIELDS = "x-cortex-fields"
"""`known`: the server that runs the model gets no fields that are not known here, which might choose another model than
the client may use. Only a gateway sets it."""
KNOWN_FIELDS = "known"

TOKEN_LIMIT = "x-cortex-token-limit"
"""The token limit of a request, prompt and all choices together, as reserved by its key. Only a gateway sets it."""

WAITED = "x-cortex-waited-ms"
"""How long a request waited at the gateway, for dialects whose responses report durations. Only a gateway sets it."""

PROMPT_TOKENS = "x-cortex-prompt-tokens"
"""The tokens of a prompt that is larger than `TOKEN_LIMIT`, in the error of the node."""

RELAYED = "x-cortex-relayed"
"""Marks a response of a model's server that the node has not parsed: its usage is in the body."""

RECOVERS = "x-cortex-recovers"
"""Marks the error of a node that reloads the model after a fault: the request can wait or go elsewhere."""

BUDGET = "x-cortex-budget"
"""The tokens that a request may use, its prompt included, where the budget of its key may end the response, from the
gateway to the client."""

DIMENSIONS = "x-cortex-dimensions"
"""The length of the vectors in a response with embeddings, from a node."""

VECTORS = "x-cortex-vectors"
"""`base64`: a gateway reads vectors as bytes and writes them as its client wants them. In the response: they are."""
AS_BASE64 = "base64"

NODE = "x-cortex-node"
"""The name of the node that served the request, from the gateway to the client."""


DROPPED_TOOLS = "x-cortex-dropped-tools"
"""Types of tools that were removed from a request because no model here can use them."""

NOT_STORED = "x-cortex-not-stored"
"""Why a response was not stored although requested, from the gateway to the client."""

IGNORED_FIELDS = "x-cortex-ignored-fields"
"""Unknown fields of the body, which had no effect."""

UNENFORCED = "x-cortex-unenforced"
"""Parts of schemas and formats that are not enforced, because no grammar can express them."""


def notes(request: GenerateRequest) -> dict[str, str]:
    """The headers that report which parts of a request have no effect."""
    parts = {
        DROPPED_TOOLS: request.dropped_tools,
        IGNORED_FIELDS: request.ignored_fields,
        UNENFORCED: request.unenforced,
    }
    return {name: text for name, values in parts.items() if (text := listed(values))}


def listed(values: Iterable[str]) -> str:
    """`values` as one header value, limited in length and without characters that could end the header."""
    starts = (value[:MAX_ECHO] for value in islice(values, MAX_ECHO))  # no more than these can be shown
    kept = ("".join(c for c in start if c.isascii() and c.isprintable() and c != ",") for start in starts)
    return ", ".join(dict.fromkeys(kept))[:MAX_ECHO]
