"""People who sign in to the page without a key: through OpenID Connect, or through a proxy that knows who they are.

A user is charged and authorised like the owner of a key, under an id that no key has. The configuration in force
decides per request what roles permit.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from cortex.gateway.ledger.keys import KeySection
from cortex.http.request import Request
from cortex.settings import Section
from cortex.wire.errors import InvalidAPIKey

MAX_NAME = 200
_USER = "user:"


class SignInSection(Section, frozen=True):
    """Sign-in to the page without a key. Keys stay possible. API clients need a key in any case."""

    issuer: str | None = None
    """The OpenID Connect provider, such as `https://login.example.com/realms/lab`. Needs the extra `oidc`."""
    client_id: str | None = None
    """This gateway's id at the provider."""
    client_secret_env: str | None = None
    """The environment variable that holds the client's secret; absent: a public client, with PKCE alone."""
    public_url: str | None = None
    """Where browsers reach the page, such as `https://cortex.example.com`. `/session/callback` below it is the redirect
    URL that the provider must know."""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    """Scopes requested from the provider."""
    name_claim: str = "preferred_username"
    """The claim with the name of a user, as shown in usage and logs; `sub` where it is missing."""
    roles_claim: str = "groups"
    """The claim with the roles of a user, a list of texts; dots lead into objects, as in `realm_access.roles`."""
    operator_roles: tuple[str, ...] = ()
    """Roles of operators."""
    user_roles: tuple[str, ...] = ()
    """Roles that may sign in; empty: every user whom the provider or the proxy authenticates."""
    models: tuple[str, ...] = ()
    """Models that users may use, as ids or patterns with `*`; when empty, those of `group`, else all."""
    group: str | None = None
    """The group of `[[groups]]` whose limits all users share."""
    conversations: bool = False
    """Keep the conversations of everybody who signs in to the page, also with a key, in the database of `ledger`, so
    that they appear in every browser. Otherwise they stay in the browser."""
    proxy_addresses: tuple[str, ...] = ()
    """Addresses or networks of proxies whose headers say who the user is. The proxy must remove these headers from what
    clients send."""
    proxy_user_header: str = "x-forwarded-user"
    """The header with the name of the user, of these proxies only."""
    proxy_roles_header: str = "x-forwarded-groups"
    """The header with the roles of the user, separated by commas."""

    def __post_init__(self) -> None:
        for address in self.proxy_addresses:
            try:
                ipaddress.ip_network(address, strict=False)
            except ValueError as problem:
                raise ValueError(f"proxy_addresses has `{address}`, which is no address or network") from problem
        if self.issuer is None:
            return
        for name in ("issuer", "public_url"):
            value = getattr(self, name)
            parts = urlsplit(value or "")
            is_local = parts.hostname in ("localhost", "127.0.0.1", "::1")
            if parts.scheme != "https" and not (parts.scheme == "http" and is_local):
                raise ValueError(f"{name} must be an https:// URL, got `{value}`")
        if not self.client_id:
            raise ValueError("client_id is missing: with an issuer, it must be set")

    @property
    def is_enabled(self) -> bool:
        return self.issuer is not None or bool(self.proxy_addresses)

    def operates(self, roles: Iterable[str]) -> bool:
        return not set(self.operator_roles).isdisjoint(roles)

    def key_of(self, user: User) -> KeySection:
        """A key with the rights of `user`. Raises InvalidAPIKey."""
        is_operator = self.operates(user.roles)
        if not is_operator and self.user_roles and set(self.user_roles).isdisjoint(user.roles):
            raise InvalidAPIKey(f"{user.name} has none of the roles that may use this gateway; ask the operator.")
        return KeySection(
            name=user.name,
            id=f"{_USER}{user.id}",
            sha256="",
            models=self.models,
            group=self.group,
            operator=is_operator,
        )

    def relevant(self, roles: Iterable[str]) -> tuple[str, ...]:
        """Those of `roles` that this configuration names."""
        return tuple(sorted({*self.operator_roles, *self.user_roles}.intersection(roles)))

    def proxied(self, request: Request) -> User | None:
        """The user that a trusted proxy names. None if the request came from elsewhere or names no one."""
        if not self.proxy_addresses or not request.client:
            return None
        name = request.text(self.proxy_user_header.lower().encode())
        if not name or len(name) > MAX_NAME or not name.isprintable():
            return None
        address = ipaddress.ip_address(request.client.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        if not any((mapped or address) in ipaddress.ip_network(each, strict=False) for each in self.proxy_addresses):
            return None
        roles = request.text(self.proxy_roles_header.lower().encode()) or ""
        return User(
            name=name, id=f"proxy:{name}", roles=tuple(filter(None, (role.strip() for role in roles.split(","))))
        )


class User(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who signed in without a key."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    """For display only: many providers let people choose any name."""
    id: str
    """Their records are kept under it. Ids of provider users and proxy users never collide."""
    roles: tuple[str, ...] = ()


def openid_id(issuer: str, subject: str) -> str:
    """The id of a user of an OpenID Connect provider, which never reassigns a `subject`."""
    return f"openid:{hashlib.sha256(f'{issuer} {subject}'.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def is_user(key: KeySection) -> bool:
    """Whether `key` stands for a user who signed in without one."""
    return key.id.startswith(_USER)
