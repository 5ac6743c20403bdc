"""Files that one node gets from another: their source, and the ticket that grants access.

A gateway names the nodes that have a model's files in its orders, each with a ticket. It is a message authentication
code under the key that the gateway has for that node, so no node gets the key of another. It opens the files of one
repository, or KV blocks, for a day, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Annotated, Final

from msgspec import Meta

from cortex.wire.node.load_options import is_path
from cortex.wire.node.protocol import NodeValue

PATH: Final = "/files/shared/"
"""`GET /files/shared/{owner}/{name}?revision=main` lists a repository as the node has it. `GET
/files/shared/{owner}/{name}/{digest}` sends a file of it, from the `offset` of the query on."""
TICKET_S: Final = 24 * 3600.0
MAX_NEIGHBOURS: Final = 8
LOCAL: Final = "files-of-nodes"
"""The owner of repositories that stand for paths on nodes."""
_TICKET: Final = re.compile(r"ticket-(?P<expires>\d{1,12})-(?P<code>[0-9a-f]{64})")
_REPOSITORY: Final = re.compile(r"(?P<name>[^/@:\s]+/[^/@:\s]+)(?:@[^:\s]+)?(?::[\w.-]+)?")


class Neighbour(NodeValue, frozen=True):
    """A node that has files of the model."""

    name: str
    """As the gateway calls it."""
    url: Annotated[str, Meta(max_length=2048)]
    ticket: str | None = None
    """Absent if the node needs no key."""
    authority: Annotated[str, Meta(max_length=1 << 20)] | None = None
    """The certificates that verify it, in PEM. Absent: those of the system."""


class SharedFile(NodeValue, frozen=True):
    path: str
    num_bytes: int
    digest: str
    """As the hub names it: SHA-256 of the contents for large files, git's SHA-1 of the blob for small ones."""


class SharedRepository(NodeValue, frozen=True):
    """The complete files of a repository at the commit that a node has of a revision."""

    commit: str
    files: tuple[SharedFile, ...]


def repository_of(source: str) -> str | None:
    """The repository of a hub id, also with a revision or a quantisation. For a path the name under which nodes share
    its files; None for what is neither."""
    if is_path(source):
        name = re.sub(r"[^A-Za-z0-9]+", "-", source.rstrip("/").rpartition("/")[2])[:40].strip("-")
        return f"{LOCAL}/{name or 'model'}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    match = _REPOSITORY.fullmatch(source)
    return None if match is None else match["name"]


def is_of_path(repository: str) -> bool:
    """Whether it is a copy of files at a path, which no hub has."""
    return repository.startswith(f"{LOCAL}/")


def key_hash(key: str) -> bytes:
    """The stored form of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_ticket(hash_of_key: bytes, scope: str, now_s: float) -> str:
    """`scope`: a repository, or `kv_blocks.SCOPE`. `now_s`: seconds since the epoch."""
    expires = int(now_s + TICKET_S)
    return f"ticket-{expires}-{_code(hash_of_key, scope, expires)}"


def is_valid_ticket(text: str, hash_of_key: bytes, scope: str, now_s: float) -> bool:
    match = _TICKET.fullmatch(text)
    if match is None or not now_s <= int(match["expires"]) <= now_s + 2 * TICKET_S:
        return False
    return hmac.compare_digest(match["code"], _code(hash_of_key, scope, int(match["expires"])))


def _code(hash_of_key: bytes, scope: str, expires: int) -> str:
    return hmac.new(hash_of_key, f"files of {scope} until {expires}".encode(), hashlib.sha256).hexdigest()
