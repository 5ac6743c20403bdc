"""Tenants: groups of clients that share cached prefixes.

A gateway authenticates clients and decides with whom each shares; a client may narrow that with a salt. Nodes get only
a digest, and never match prompts that they keep under another one.
"""

from __future__ import annotations

import hashlib

from cortex.wire.fields.body import Fields

SALT = "cache_salt"
"""The field of requests by which clients narrow their tenant, and by which vLLM and SGLang separate cached prefixes."""
NAMED_BYTES = 8
"""The first bytes of a tenant, shared by all its narrowed tenants."""
EVERYBODY = b""
"""The tenant of all clients that are not separated."""


def tenant_of(*parts: bytes) -> bytes:
    """The digest of all `parts` together, 16 bytes; without any, `EVERYBODY`."""
    if not any(parts):
        return EVERYBODY
    digest = hashlib.blake2b(digest_size=16, person=b"tenant")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def narrowed(tenant: bytes, salted: bytes) -> bytes:
    """The clients of `tenant` that have the same salt. It begins like `tenant`, so that what nodes keep of all of them
    can be found and deleted."""
    whole = tenant_of(tenant, salted)
    return tenant[:NAMED_BYTES] + whole[len(tenant[:NAMED_BYTES]) :]


def read_tenant(fields: Fields) -> bytes:
    """The tenant that `cache_salt` of a body makes, among all clients. Raises InvalidValue."""
    salt = fields.text(SALT) or ""
    return tenant_of(salt.encode("utf-8", "surrogatepass"))
