"""API keys: generating, storing and recognising them.

A key is `ck-<id>-<secret>`. The id is public and identifies the key in configuration and usage records. Of the whole
key only the SHA-256 is stored. The secret has 256 random bits, so a slow hash would add nothing but latency.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import math
import secrets
import string
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec

from cortex.settings import Section
from cortex.wire.errors import InvalidAPIKey, ModelNotAllowed, OperatorOnly, shorten
from cortex.wire.fields.request_class import RequestClass, served_class
from cortex.wire.tenant import EVERYBODY, NAMED_BYTES, tenant_of

PREFIX = "ck"
_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 8
_SECRET_LENGTH = 43
"""Letters and digits for 256 bits."""
_KEY_LENGTH = len(PREFIX) + 1 + _ID_LENGTH + 1 + _SECRET_LENGTH

PrefixSharing = Literal["key", "group", "all"]
"""Which clients may share cached prefixes."""
Limit = Annotated[int, msgspec.Meta(ge=0)]
Money = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class KeySection(Section, frozen=True):
    """An API key, made by `cortex keys add`. A limit that is not set does not apply."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """The name of its owner, as shown in `cortex usage` and metrics."""
    id: Annotated[str, msgspec.Meta(pattern=f"^[A-Za-z0-9]{{{_ID_LENGTH}}}$")]
    """The public part of the key."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """The hash of the whole key. The key itself is shown only once, when it is made."""
    models: tuple[str, ...] = ()
    """Models that it may use, as ids or patterns with `*`; all when empty."""
    requests_per_min: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Requests per minute; bursts up to this number are admitted at once."""
    window_tokens: Limit | None = None
    """Prompt and completion tokens within `window_s`."""
    window_s: Annotated[int, msgspec.Meta(ge=60)] = 86400
    """The rolling window of `window_tokens` and `window_cost`, in whole minutes."""
    balance_tokens: Limit | None = None
    """Lifetime tokens of the key; raise it to top the key up."""
    window_cost: Money | None = None
    """What it may cost within `window_s`, by the prices in `models.toml` and in their currency. Models without prices
    are free."""
    balance_cost: Money | None = None
    """What it may cost in total."""
    group: str | None = None
    """The group of `[[groups]]` whose limits it shares, in addition to its own."""
    request_class: RequestClass | None = None
    """The class of requests that name none: `idle`, `flex`, `default` or `priority`. When absent: that of its group,
    else `default`."""
    highest_class: RequestClass | None = None
    """The highest class that its requests may have. When absent: that of its group, else any."""
    operator: bool = False
    """Whether it may also load, unload and pin models, and manage keys."""
    expires: str | None = None
    """When it stops working: a date or a time, such as `2026-12-31` or `2026-12-31T18:00:00Z` (UTC unless it has a
    zone). Never when absent."""

    def __post_init__(self) -> None:
        if self.expires is not None:
            expiry_of(self.expires)

    @property
    def sees_nodes(self) -> bool:
        """Whether responses to this key may name nodes."""
        return self.operator or not self.models

    @property
    def expires_at(self) -> float:
        """When it stops working, in seconds since 1970."""
        return math.inf if self.expires is None else expiry_of(self.expires)


def expiry_of(text: str) -> float:
    """Seconds since 1970 of a date, whose first second it is, or of a time. Raises ValueError."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as problem:
        raise ValueError(
            f"expires must look like `2026-12-31` or `2026-12-31T18:00:00Z`, got `{text[:60]}`"
        ) from problem


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A newly generated key. `text` is the only copy of the whole key."""

    text: str
    section: KeySection


def generate(name: str, *, expires: str | None = None, **limits: Any) -> NewKey:
    """A new key for `name`; `limits` are other fields of its section. Raises ValueError, also when it has expired
    already."""
    if expires is not None and expiry_of(expires) <= time.time():
        raise ValueError(f"expires must be in the future, got `{expires}`")
    key_id = _random_text(_ID_LENGTH)
    text = f"{PREFIX}-{key_id}-{_random_text(_SECRET_LENGTH)}"
    return NewKey(text=text, section=KeySection(name=name, id=key_id, sha256=_hash(text), expires=expires, **limits))


def as_toml(section: Section, table: str = "keys") -> str:
    """The `[[keys]]` or `[[groups]]` table to append to a configuration file, without fields at their default."""
    lines = [f"[[{table}]]"]
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if value != field.default:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


class Keyring:
    """The keys in force. Immutable: a reload makes a new one. Raises `ValueError` when two keys have the same id."""

    def __init__(self, keys: Iterable[KeySection], clock: Callable[[], float] = time.time) -> None:
        self._by_id: dict[str, KeySection] = {}
        self._expires_at: dict[str, float] = {}
        """Only of keys that expire."""
        self._clock = clock
        for key in keys:
            if key.id in self._by_id:
                raise ValueError(f"keys `{self._by_id[key.id].name}` and `{key.name}` have the same id `{key.id}`")
            self._by_id[key.id] = key
            if key.expires is not None:
                self._expires_at[key.id] = key.expires_at

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[KeySection]:
        return iter(self._by_id.values())

    def find(self, key_id: str) -> KeySection | None:
        """The key with this public id; None when there is none, or it has expired."""
        key = self._by_id.get(key_id)
        return None if key is not None and self._has_expired(key) else key

    def recognise(self, text: str) -> KeySection:
        """The key with this text. Raises `InvalidAPIKey`."""
        key = self._by_id.get(text[len(PREFIX) + 1 : len(PREFIX) + 1 + _ID_LENGTH])
        # An unknown id is hashed as well, because the time taken must not reveal which ids exist. Text longer than a
        # key is cut, because the cost must not depend on its length.
        digest = _hash(text[: _KEY_LENGTH + 1])
        if key is None or not hmac.compare_digest(digest, key.sha256):
            raise InvalidAPIKey("This API key is unknown; ask the operator for one.")
        if self._has_expired(key):
            raise InvalidAPIKey(f"The key `{key.name}` expired on {key.expires}; ask the operator for a new one.")
        return key

    def _has_expired(self, key: KeySection) -> bool:
        return key.id in self._expires_at and self._clock() >= self._expires_at[key.id]


def may_use(key: KeySection | None, model: str) -> bool:
    """Whether `key` may use `model`; None, a client of an open gateway, may use all."""
    return key is None or not key.models or any(fnmatch.fnmatchcase(model, pattern) for pattern in key.models)


def class_of_key(key: KeySection | None, asked: RequestClass | None) -> RequestClass:
    """The class in which a request of `key` is served; None for a client of an open gateway."""
    return served_class(asked) if key is None else served_class(asked, key.request_class, key.highest_class)


def tenant_of_key(key: KeySection | None, sharing: PrefixSharing) -> bytes:
    """The tenant of a client with `key`; None for a client of an open gateway. It is the same at every gateway that has
    the key, and cannot be computed without the key."""
    if key is None or sharing == "all":
        return EVERYBODY
    return _tenant("group", key.group) if sharing == "group" and key.group else _tenant("key", key.id, key.sha256)


def tenant_name(owner: KeySection | str) -> str:
    """The prefix of the tenant of a key, or of a group by its name: enough to delete what nodes keep for it, too little
    to impersonate it."""
    tenant = _tenant("group", owner) if isinstance(owner, str) else tenant_of_key(owner, "key")
    return tenant.hex()[:NAMED_BYTES]


def tenants_of(key: KeySection) -> tuple[str, ...]:
    """The names of all tenants that the key belongs or belonged to, unless all clients share."""
    return (tenant_name(key), *((tenant_name(key.group),) if key.group else ()))


@lru_cache(maxsize=4096)
def _tenant(*names: str) -> bytes:
    return tenant_of(*(name.encode("utf-8", "surrogatepass") for name in names))


def check_model(key: KeySection, model: str) -> None:
    """Raise `ModelNotAllowed` when `key` may not use `model`."""
    if not may_use(key, model):
        allowed = ", ".join(f"`{pattern}`" for pattern in key.models)
        raise ModelNotAllowed(f"The key `{key.name}` may not use `{shorten(model)}`, only {allowed}.", param="model")


def check_operator(key: KeySection) -> None:
    """Raise `OperatorOnly` when `key` may not load, unload and pin models."""
    if not key.operator:
        raise OperatorOnly(
            f"The key `{key.name}` may use models, but not load, unload or pin them; use an operator's key."
        )


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _toml(value: str | float | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # TOML writes strings, numbers and booleans as JSON does.
    return msgspec.json.encode(value).decode()
