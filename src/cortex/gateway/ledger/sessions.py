"""Sessions of the page: a browser that signed in with a key sends a cookie instead of the key.

A session is `<key id>.<expiry>.<signature>`. Nothing is stored for it. The signature covers the hash of the key, so a
session ends when its key is removed or replaced. For a user who signed in without a key it has their name, id and roles
instead of the key's id. The signing secret lives in the gateway's state directory, is created by the first sign-in, and
lets sessions outlive a restart.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from cortex.gateway.ledger.keys import Keyring, KeySection
from cortex.gateway.ledger.users import SignInSection, User
from cortex.http.request import Request
from cortex.system import private_file
from cortex.wire.errors import InvalidAPIKey
from cortex.wire.words import about

log = logging.getLogger(__name__)

COOKIE = b"cortex_session"
PAGE_HEADER = b"x-cortex-page"
"""The page sends it with every request. Scripts of other origins cannot, because a preflight request would fail."""
LIFETIME_S = 12 * 3600
SECRET_FILE = "page-sessions.secret"
_SECRET_BYTES = 32
_READS = (b"GET", b"HEAD")


T = TypeVar("T")
_SEALED = "s"
"""Prefix of what `Sessions.sealed` makes. Ids of keys are longer."""


class _UserSession(msgspec.Struct, frozen=True, kw_only=True):
    user: User
    expires: int


class Sessions:
    """Issues and recognises sessions. Used on the loop's thread."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """The secret is kept in `directory`."""
        self._path = directory / SECRET_FILE
        self._clock = clock
        self._secret: bytes | None = None

    def issue(self, key: KeySection) -> str:
        """A new session for the owner of `key`."""
        expires = int(self._clock()) + LIFETIME_S
        return f"{key.id}.{expires}.{self._signature(key, expires)}"

    def issue_user(self, user: User) -> str:
        """A new session for a user without a key."""
        return self.sealed(_UserSession(user=user, expires=int(self._clock()) + LIFETIME_S))

    def sealed(self, value: msgspec.Struct) -> str:
        """`value`, signed but not encrypted: only this gateway can make it, anyone can read it."""
        payload = base64.urlsafe_b64encode(msgspec.json.encode(value)).decode()
        return f"{_SEALED}.{payload}.{self._sign(f'{type(value).__name__}.{payload}')}"

    def unsealed(self, text: str, kind: type[T]) -> T | None:
        """The value in `text`; None if `sealed` did not make it."""
        mark, _, rest = text.partition(".")
        payload, _, signature = rest.partition(".")
        expected = self._sign(f"{kind.__name__}.{payload}")
        if mark != _SEALED or not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
            return None
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(payload), type=kind)
        except msgspec.ValidationError:
            return None  # another version of this gateway made it, with other fields

    def recognise(self, keyring: Keyring, request: Request, sign_in: SignInSection) -> KeySection:
        """The key of the session that `request` carries, or one with its user's rights. Raises InvalidAPIKey."""
        text = session_of(request) or ""
        check_from_page(request)
        if text.startswith(f"{_SEALED}."):
            found = self.unsealed(text, _UserSession)
            if found is None or found.expires <= self._clock() or sign_in.issuer is None:
                raise _ended()
            return sign_in.key_of(found.user)
        key_id, _, rest = text.partition(".")
        expires, _, signature = rest.partition(".")
        key = keyring.find(key_id)
        if key is None or not (expires.isascii() and expires.isdigit() and len(expires) < 16):
            raise _ended()
        if not hmac.compare_digest(signature.encode(), self._signature(key, int(expires)).encode()):
            raise _ended()
        if int(expires) <= self._clock():
            raise _ended()
        return key

    def _signature(self, key: KeySection, expires: int) -> str:
        return self._sign(f"{key.id}.{key.sha256}.{expires}")

    def _sign(self, text: str) -> str:
        if self._secret is None:
            self._secret = self._read_secret()
        return hmac.new(self._secret, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _read_secret(self) -> bytes:
        try:
            if (found := self._existing()) is not None:
                return found
            self._path.parent.mkdir(parents=True, exist_ok=True)
            secret = secrets.token_bytes(_SECRET_BYTES)
            private_file.write(self._path, secret)
            return self._existing() or secret  # another process may have written it at the same time
        except OSError as problem:
            log.warning(
                "sign-ins to the page will not survive a restart: cannot use %s", about(str(self._path), problem)
            )
            return secrets.token_bytes(_SECRET_BYTES)

    def _existing(self) -> bytes | None:
        try:
            secret = self._path.read_bytes()
        except FileNotFoundError:
            return None
        if len(secret) < _SECRET_BYTES:
            raise OSError(f"it has {len(secret)} bytes, not {_SECRET_BYTES}; delete it")
        return secret


def check_from_page(request: Request) -> None:
    """Raises InvalidAPIKey for a request that another site may have forged: browsers attach cookies, and proxies their
    user headers, to those too. A request that changes something needs the page's header."""
    if is_cross_site(request) or (request.method not in _READS and request.header(PAGE_HEADER) is None):
        raise InvalidAPIKey("A session is valid for requests of the page only; send an API key instead.")


def session_of(request: Request) -> str | None:
    """The session cookie of a request."""
    for part in (request.header(b"cookie") or b"").split(b";"):
        name, _, value = part.strip().partition(b"=")
        if name == COOKIE:
            return value.decode("latin-1")
    return None


def is_cross_site(request: Request) -> bool:
    """Whether a browser reports that a page of another origin sent the request."""
    return request.header(b"sec-fetch-site") in (b"cross-site", b"same-site")


def _ended() -> InvalidAPIKey:
    return InvalidAPIKey("This session has ended; sign in again.")
