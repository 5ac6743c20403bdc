"""Access to a node: for callers with one of its keys, and not for web pages of other sites."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cortex.http.cross_site import CrossSiteCheck
from cortex.http.request import Request
from cortex.http.routing import Match, Route
from cortex.neuron.config import NeuronConfig, check_key
from cortex.settings import SettingsError
from cortex.wire.dialects.registry import DIALECTS, FAMILIES
from cortex.wire.errors import CortexError, InvalidAPIKey
from cortex.wire.fields.body import check_content_type
from cortex.wire.node.kv_blocks import PATH as KV_PATH
from cortex.wire.node.kv_blocks import SCOPE
from cortex.wire.node.neighbours import PATH as SHARED_FILES
from cortex.wire.node.neighbours import is_valid_ticket, key_hash
from cortex.wire.opaque.routes import is_opaque

OPEN_PATH = b"/health"
"""Needs no key; without one the response has only the status."""
_UNDECLARED_PATHS = tuple(each.prefix for each in FAMILIES if each.prefix and not each.declares_bodies)
"""Paths of clients that omit Content-Type."""
_INFERENCE_PATHS = (
    *("/v1/", "/tokenize", "/detokenize", "/apply-template"),
    *(dialect.path for dialect in DIALECTS.values() if dialect.family.declares_bodies),
)
_HASHED_CHARACTERS = 1024
"""The cost of a check must not depend on what an unauthenticated client sends."""


class NodeKeys:
    """The keys in force, as hashes. If there were keys before, an empty set rejects every caller."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.required = False
        self._hashes: tuple[bytes, ...] = ()
        self.use(keys)

    def use(self, keys: Iterable[str]) -> None:
        """Replace the keys."""
        self._hashes = tuple(map(key_hash, keys))
        self.required = self.required or bool(self._hashes)

    def recognises(self, text: str) -> bool:
        """Whether `text` is one of the keys. Takes the same time whatever `text` is and whichever key it matches."""
        given = key_hash(text[:_HASHED_CHARACTERS])
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        return any(matches)

    def admits_ticket(self, text: str, match: Match[Any] | None) -> bool:
        """Whether `text` is a gateway's ticket for the route: files of a repository, or KV blocks."""
        path = "" if match is None else match.route.path
        if match is None or not (path == KV_PATH or path.startswith(SHARED_FILES)):
            return False
        scope = SCOPE if path == KV_PATH else match.values["repository"]
        return any(is_valid_ticket(text, known, scope, time.time()) for known in self._hashes)


def read_keys(config: NeuronConfig, directory: Path) -> tuple[str, ...]:
    """The keys of `config` and of its `key_file`, which is relative to `directory`. Raises SettingsError."""
    if config.key_file is None:
        return config.keys
    path = directory / config.key_file.expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise SettingsError(
            f"cannot read key_file {path}: {reason}; make one with `neuron key`, readable for the node's user"
        ) from problem
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise SettingsError(f"key_file {path} has no key: write one with `neuron key > {path}`")
    for number, key in enumerate(keys, 1):
        try:
            check_key(key)
        except ValueError as problem:
            raise SettingsError(f"invalid key {number} in key_file {path}: {problem}") from problem
    return (*config.keys, *keys)


class NodeAccess:
    """Checks every request before its body is read."""

    def __init__(self, keys: NodeKeys, allowed_hosts: Iterable[str] = ()) -> None:
        self._keys = keys
        self._cross_site = CrossSiteCheck(allowed_hosts)

    def check(self, request: Request, match: Match[Any] | None) -> None:
        """Raises the CortexError that rejects the caller. `match`: the route of the request, if there is one."""
        if request.path != OPEN_PATH or _key_in(request) is not None:
            self._check_caller(request, match)

    def check_form(self, request: Request, route: Route[Any]) -> None:
        """Raises the CortexError for a request that another site's web page may have sent."""
        content_type, origin = request.text(b"content-type"), request.text(b"origin")
        if is_opaque(route.path):  # a form needs no permission of the browser, and GET may load
            self._cross_site.check_origin(origin, request.text(b"host"), request.text(b"sec-fetch-site"))
            return
        if request.method in (b"GET", b"HEAD"):
            return
        if route.path.startswith(_UNDECLARED_PATHS) and origin is None:
            return  # web pages always send their origin
        if route.path.startswith(_INFERENCE_PATHS):
            check_content_type(content_type, required=origin is not None)
        else:
            fetch_site = request.text(b"sec-fetch-site")
            self._cross_site.check_origin(origin, request.text(b"host"), fetch_site)
            check_content_type(content_type, required=request.method != b"DELETE")

    def admits(self, request: Request) -> bool:
        """Whether the caller may see everything."""
        try:
            self._check_caller(request)
        except CortexError:
            return False
        return True

    def _check_caller(self, request: Request, match: Match[Any] | None = None) -> None:
        if not self._keys.required:
            # A key would show that no web page sent the request. Without keys, the name that it used has to.
            self._cross_site.check_host(request.text(b"host"))
            return
        given = _key_in(request)
        if given is None:
            raise InvalidAPIKey("This node needs a key: send `Authorization: Bearer …`. Its operator has it.")
        if not (self._keys.recognises(given) or self._keys.admits_ticket(given, match)):
            raise InvalidAPIKey("This node does not accept this key: send one of `keys` or `key_file` of its operator.")


def _key_in(request: Request) -> str | None:
    authorization = request.text(b"authorization") or ""
    if authorization[:7].lower() == "bearer ":
        return authorization[7:].strip()
    return request.text(b"x-api-key")
