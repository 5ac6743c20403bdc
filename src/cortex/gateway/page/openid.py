"""Sign-in through OpenID Connect: the authorisation code flow with PKCE.

PyJWT verifies the tokens of the provider. The state of the flow is in a signed cookie, so that the gateway stores
nothing until the user has signed in.

Anybody can begin a sign-in, so a provider that hangs must not hold shared resources: one sign-in at a time calls the
provider, in a process that is ended when a call takes too long. Concurrent sign-ins share the call for the metadata,
and a provider that did not respond is not called again for `_FAILED_S`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import parse_qs, urlencode

import msgspec

from cortex.gateway.ledger.users import MAX_NAME, SignInSection, User, openid_id
from cortex.gateway.page import provider_requests
from cortex.ipc.helper import Helper, function_of
from cortex.ipc.pool import CallLost, HelperPool, PoolLost
from cortex.settings import SettingsError
from cortex.wire.errors import CortexError, InvalidAPIKey, Overloaded, UpstreamUnavailable

if TYPE_CHECKING:
    import jwt

    from cortex.gateway.page.provider_requests import ProviderResponse

T = TypeVar("T")
FLOW_S = 600
"""How long a user may take to sign in at the provider."""
_TIMEOUT_S = 10.0
_CACHED_S = 3600.0
_KEYS_CACHED_S = 300.0
_KEYS_MIN_S = 30.0
"""The keys are not read again sooner, even if a token names an unknown one."""
_FAILED_S = 5.0
_MAX_CALLS = 16
"""Sign-ins that call the provider or wait for it; further ones are rejected."""
_LEEWAY_S = 60
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with the provider's private key. Those with a shared secret are not accepted."""
_REJECTIONS = frozenset(
    {
        "invalid_request",
        "unauthorized_client",
        "access_denied",
        "unsupported_response_type",
        "invalid_scope",
        "server_error",
        "temporarily_unavailable",
        "interaction_required",
        "login_required",
        "account_selection_required",
        "consent_required",
        "invalid_request_uri",
        "invalid_request_object",
        "request_not_supported",
        "request_uri_not_supported",
        "registration_not_supported",
    }
)
"""The errors that a provider may return instead of a code (RFC 6749, 4.1.2.1, and OpenID Connect Core, 3.1.2.6)."""


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What a sign-in must remember until its callback."""

    state: str
    nonce: str
    verifier: str
    """The code verifier of PKCE (RFC 7636)."""
    expires: int


class _Provider(msgspec.Struct, frozen=True, kw_only=True):
    """The provider's metadata."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    id_token_signing_alg_values_supported: tuple[str, ...] = ("RS256",)
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class _Tokens(msgspec.Struct, frozen=True, kw_only=True):
    id_token: Annotated[str, msgspec.Meta(max_length=1 << 16)]


def check_library(section: SignInSection) -> None:
    """Raises SettingsError if `section` needs an extra that is not installed."""
    if section.issuer is None:
        return
    try:
        import jwt  # noqa: F401
    except ImportError as problem:
        raise SettingsError(
            "sign_in.issuer needs a library: run `pip install '.[oidc]'` in a checkout of cortex"
        ) from problem


class OpenIDClient:
    """Begins and completes sign-ins. Belongs to the loop."""

    def __init__(
        self,
        section: SignInSection,
        env: Mapping[str, str] = os.environ,
        *,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`section` has an issuer. `timeout_s` limits each call to the provider."""
        self._section = section
        self._env = env
        self._timeout_s = timeout_s
        self._clock = clock
        self._provider: _Provider | None = None
        self._read_at = 0.0
        self._reading: asyncio.Task[_Provider] | None = None
        self._keys: tuple[jwt.PyJWK, ...] = ()
        self._keys_read_at = -math.inf
        self._process = HelperPool(
            Helper(
                name="cortex-openid",
                purpose="the process that calls the sign-in provider",
                module=provider_requests.__name__,
            )
        )
        self._calling = asyncio.Lock()
        self._num_callers = 0
        self._failure = ""
        self._failed_at = -math.inf

    @property
    def _redirect_url(self) -> str:
        return f"{(self._section.public_url or '').rstrip('/')}/session/callback"

    async def begin(self) -> tuple[str, Flow]:
        """The address at the provider, and what its callback needs. Raises UpstreamUnavailable or Overloaded."""
        provider = await self._known_provider()
        flow = Flow(
            state=secrets.token_urlsafe(32),
            nonce=secrets.token_urlsafe(32),
            verifier=secrets.token_urlsafe(48),
            expires=int(time.time()) + FLOW_S,
        )
        challenge = base64.urlsafe_b64encode(hashlib.sha256(flow.verifier.encode()).digest()).rstrip(b"=").decode()
        query = urlencode(
            {
                "response_type": "code",
                "client_id": self._section.client_id,
                "redirect_uri": self._redirect_url,
                "scope": " ".join(self._section.scopes),
                "state": flow.state,
                "nonce": flow.nonce,
                "code_challenge": challenge,
                "code_challenge_method": "S256",
            }
        )
        joint = "&" if "?" in provider.authorization_endpoint else "?"
        return f"{provider.authorization_endpoint}{joint}{query}", flow

    async def complete(self, query: bytes, flow: Flow | None) -> User:
        """The user whom the provider sent back. Raises InvalidAPIKey, UpstreamUnavailable or Overloaded."""
        fields = {name: values[0] for name, values in parse_qs(query.decode("latin-1")).items()}
        if flow is None or flow.expires <= time.time():
            raise InvalidAPIKey("This sign-in took too long or began elsewhere; sign in again.")
        if not hmac.compare_digest(fields.get("state", "").encode(), flow.state.encode()):
            raise InvalidAPIKey("This sign-in was not begun in this browser; sign in again.")
        if "code" not in fields:
            # The message is logged and recorded, so it contains no text from the address, which anybody could have
            # written.
            reason = fields["error"] if fields.get("error") in _REJECTIONS else "no code"
            description = fields.get("error_description")
            details = {"error_description": description[:200]} if description else {}
            raise InvalidAPIKey(f"The provider did not sign you in: {reason}", details=details)
        provider = await self._known_provider()
        async with self._turn():
            claims = await self._claims(provider, fields["code"], flow)
        name = claims.get(self._section.name_claim) or claims["sub"]
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise InvalidAPIKey(f"The provider names you in a form that cannot be used: {str(name)[:60]!r}")
        subject = openid_id(self._section.issuer or "", str(claims["sub"]))
        return User(name=name, id=subject, roles=roles_in(claims, self._section.roles_claim))

    async def rest_idle(self) -> None:
        """Ends the process if it was not used for a while."""
        await self._process.rest_idle()

    async def close(self) -> None:
        await self._process.close()

    async def _claims(self, provider: _Provider, code: str, flow: Flow) -> dict[str, Any]:
        """The verified claims of the id token for `code`. Within a turn."""
        import jwt

        section = self._section
        body = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_url,
            "code_verifier": flow.verifier,
        }
        headers = {"accept": "application/json"}
        variable = section.client_secret_env
        secret = self._env.get(variable, "").strip() if variable is not None else ""
        if not secret:
            body["client_id"] = section.client_id or ""
        elif "client_secret_basic" in provider.token_endpoint_auth_methods_supported:
            pair = f"{section.client_id}:{secret}".encode()
            headers["authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        else:
            body |= {"client_id": section.client_id or "", "client_secret": secret}
        tokens = _decoded(await self._fetch(provider.token_endpoint, urlencode(body).encode(), headers), _Tokens)
        algorithms = [name for name in provider.id_token_signing_alg_values_supported if name in _ALGORITHMS]
        try:
            key = await self._signing_key(provider, tokens.id_token)
            claims: dict[str, Any] = jwt.decode(
                tokens.id_token,
                key,
                algorithms=algorithms,
                audience=section.client_id,
                issuer=provider.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as problem:
            raise InvalidAPIKey(f"The token of the provider is not valid: {problem}") from problem
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), flow.nonce.encode()):
            raise InvalidAPIKey("The token of the provider belongs to another sign-in; sign in again.")
        if isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and claims.get("azp") != section.client_id:
            raise InvalidAPIKey("The token of the provider was made for another program.")
        return claims

    async def _signing_key(self, provider: _Provider, token: str) -> jwt.PyJWK:
        """The provider's key that `token` names. The keys are read again after `_KEYS_CACHED_S`, so that one which the
        provider withdrew stops counting, and earlier for a name that is not among them. Raises PyJWTError."""
        import jwt

        name = jwt.get_unverified_header(token).get("kid")
        for max_age_s in (_KEYS_CACHED_S, _KEYS_MIN_S):
            if self._clock() - self._keys_read_at > max_age_s:
                content = _decoded(await self._fetch(provider.jwks_uri), dict[str, Any])
                found = jwt.PyJWKSet.from_dict(content).keys
                self._keys = tuple(key for key in found if key.public_key_use in ("sig", None) and key.key_id)
                self._keys_read_at = self._clock()
            for key in self._keys:
                if key.key_id == name:
                    return key
        raise jwt.InvalidTokenError("it names no key of the provider")

    async def _known_provider(self) -> _Provider:
        """The provider's metadata, read again once an hour. Sign-ins share one call."""
        if self._provider is not None and self._clock() - self._read_at <= _CACHED_S:
            return self._provider
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_provider())
        return await asyncio.shield(self._reading)

    async def _read_provider(self) -> _Provider:
        issuer = self._section.issuer or ""
        url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
        try:
            async with self._turn():
                found = _decoded(await self._fetch(url), _Provider)
            if found.issuer != issuer:
                raise UpstreamUnavailable(
                    f"The provider calls itself {found.issuer}, not {issuer}: correct sign_in.issuer"
                )
        except UpstreamUnavailable as problem:
            self._remember(problem)
            raise
        if self._provider != found:
            self._keys_read_at = -math.inf
        self._provider, self._read_at = found, self._clock()
        return found

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The block may call the provider. Raises UpstreamUnavailable while an earlier failure is remembered, and
        Overloaded."""
        if self._num_callers >= _MAX_CALLS:
            raise Overloaded("Too many sign-ins wait for the sign-in provider; try again.", retry_after_s=_FAILED_S)
        self._num_callers += 1
        try:
            async with self._calling:
                if self._clock() - self._failed_at < _FAILED_S:
                    raise UpstreamUnavailable(self._failure)
                yield
        finally:
            self._num_callers -= 1

    async def _fetch(self, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """Raises InvalidAPIKey or UpstreamUnavailable, without what the provider sent: it may contain secrets. Within
        a turn."""
        arguments = url, dict(headers or {}), self._timeout_s
        try:
            response: ProviderResponse = await self._process.call(
                function_of(provider_requests.request), *arguments, body=body, timeout_s=self._timeout_s
            )
        except (UpstreamUnavailable, TimeoutError, CallLost, PoolLost) as problem:
            reason = UpstreamUnavailable(
                problem.message
                if isinstance(problem, UpstreamUnavailable)
                else f"The sign-in provider does not respond: {str(problem) or f'no end within {self._timeout_s:g} s'}"
            )
            self._remember(reason)
            raise reason from problem
        if not 200 <= response.status < 300:
            raise _rejected(response)
        return response.content

    def _remember(self, problem: UpstreamUnavailable) -> None:
        if self._clock() - self._failed_at >= _FAILED_S:
            self._failure, self._failed_at = problem.message, self._clock()


def roles_in(claims: Mapping[str, Any], path: str) -> tuple[str, ...]:
    """The texts in the claim at `path`, whose dots lead into objects."""
    found: Any = claims
    for name in [path] if path in claims else path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(found, str):
        return (found,)
    return tuple(role for role in found if isinstance(role, str)) if isinstance(found, list) else ()


def _rejected(response: ProviderResponse) -> CortexError:
    try:
        reason = json.loads(response.content).get("error", "")
    except (ValueError, AttributeError):
        reason = ""
    if reason == "invalid_grant":
        return InvalidAPIKey("The provider does not accept this sign-in any more; sign in again.")
    return UpstreamUnavailable(f"The sign-in provider responded {response.status} {str(reason)[:60]}".rstrip())


def _decoded(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise UpstreamUnavailable(f"The sign-in provider sent something unexpected: {problem}") from problem
