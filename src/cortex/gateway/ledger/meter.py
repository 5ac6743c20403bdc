"""The request path's view of the ledger: who the caller is, and what a request may use.

An `OpenMeter` admits every request and records nothing. A `KeyedMeter` needs an API key for every request, reserves
tokens before the request runs and records its usage afterwards. `Metering` owns the ledger and picks the meter.

Meters and reservations are called on the event loop's thread and never wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from cortex.gateway.config import Config
from cortex.gateway.database import is_url
from cortex.gateway.ledger.estimate import Estimate, TokenLimits
from cortex.gateway.ledger.groups import Budget, NoPrices, Prices, budgets_of, with_models_of_groups
from cortex.gateway.ledger.keyed_reservation import KeyedReservation
from cortex.gateway.ledger.keys import Keyring, KeySection, check_operator
from cortex.gateway.ledger.ledger import Ledger
from cortex.gateway.ledger.sessions import Sessions, check_from_page, session_of
from cortex.gateway.ledger.store import open_store
from cortex.gateway.ledger.unwritten import UnwrittenUsage
from cortex.gateway.ledger.users import SignInSection
from cortex.http.request import Request
from cortex.settings import Listen, SettingsError
from cortex.system.tasks import Supervisor
from cortex.wire.errors import InvalidAPIKey
from cortex.wire.events import Usage

ANONYMOUS = "anonymous"
"""The principal of every request to a gateway without keys."""


ContextOf = Callable[[str], int | None]
"""The context of the model that a request names; None where it is not known."""
PricesOf = Callable[[str], Prices]
"""The prices of the model that a request names."""


def _unknown(_model: str) -> None:
    return None


def _free(_model: str) -> NoPrices:
    return NoPrices()


class Reservation(Protocol):
    """The tokens that one request holds, from its admission until its usage is known. Ends once, by `settle` or
    `cancel`."""

    @property
    def principal(self) -> str:
        """The name of the key that is charged, for metrics and for the node."""

    @property
    def key(self) -> KeySection | None:
        """The key that is charged, as it is now configured; None on an open gateway."""

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the request may use, prompt and all choices together; None without a budget."""

    @property
    def is_tight(self) -> bool:
        """Whether the budget may end the response before the client's limit or the model's context does."""

    def max_prompt_tokens(self, most: int) -> int:
        """More tokens than this a prompt cannot have, which has at most `most` by its size."""

    def extend(self, prompt_tokens: int) -> int | None:
        """Reserve enough for a prompt with this many tokens, and for a response; returns `token_limit`. Raises
        RateLimitExceeded or InsufficientQuota."""

    def settle(self, usage: Usage | None, *, model: str, node: str) -> None:
        """Replace the reservation by `usage`; None when there was no response."""

    def cancel(self) -> None:
        """The request was rejected after all: record nothing."""


class Meter(Protocol):
    """Authenticates requests, admits them and records their usage."""

    def admit(
        self,
        key: KeySection | None,
        prompt_bytes: int,
        limits: TokenLimits,
        context: ContextOf = _unknown,
        prices: PricesOf = _free,
        is_counted: bool = False,
    ) -> Reservation:
        """Reserve what a request of `key`, from `key()`, may use. Raises RateLimitExceeded or InsufficientQuota, and
        InvalidAPIKey where a key is needed and there is none.

        `prompt_bytes` is 0 for a request that uses no tokens, and with `is_counted` it is the number of its tokens.
        `context` and `prices` are called only where a key has a budget.
        """

    def authenticate(self, request: Request) -> str:
        """The principal of a request, from its headers alone. Raises InvalidAPIKey.

        This is the first check of every request, before its body is read: its cost does not depend on what the headers
        contain.
        """

    def key(self, request: Request) -> KeySection | None:
        """The key of a request; None on an open gateway. Raises InvalidAPIKey."""

    def authenticate_operator(self, request: Request) -> str:
        """The principal of a request that changes the fleet. Raises InvalidAPIKey or OperatorOnly."""

    def sign_in(self, key_text: str) -> tuple[KeySection, str] | None:
        """A key and a session of the page for its owner; None where there are none. Raises InvalidAPIKey."""


class FreeReservation:
    """What a request holds that is charged to nobody: any on an open gateway, and health checks of servers."""

    __slots__ = ("is_tight", "key", "principal", "token_limit")

    def __init__(self, key: KeySection | None = None) -> None:
        self.principal = ANONYMOUS if key is None else key.name
        self.key = key
        self.token_limit = None
        self.is_tight = False

    def max_prompt_tokens(self, most: int) -> int:
        return most

    def extend(self, prompt_tokens: int) -> None:
        """Nothing is reserved."""

    def settle(self, usage: Usage | None, *, model: str, node: str) -> None:
        """Nothing is recorded."""

    def cancel(self) -> None:
        """Nothing is reserved."""


class OpenMeter:
    """The meter of an open gateway: admits every request and records nothing."""

    _reservation = FreeReservation()

    def admit(
        self,
        key: KeySection | None,  # noqa: ARG002
        prompt_bytes: int,  # noqa: ARG002
        limits: TokenLimits,  # noqa: ARG002
        context: ContextOf = _unknown,  # noqa: ARG002
        prices: PricesOf = _free,  # noqa: ARG002
        is_counted: bool = False,  # noqa: ARG002
    ) -> Reservation:
        return self._reservation

    def authenticate(self, request: Request) -> str:  # noqa: ARG002
        return ANONYMOUS

    def key(self, request: Request) -> KeySection | None:  # noqa: ARG002
        return None

    def authenticate_operator(self, request: Request) -> str:  # noqa: ARG002
        return ANONYMOUS

    def sign_in(self, key_text: str) -> tuple[KeySection, str] | None:  # noqa: ARG002
        return None


class KeyedMeter:
    """Every request needs a key, and its usage is charged to it. Without keys every request is rejected."""

    def __init__(self, ledger: Ledger, sessions: Sessions | None = None, sign_in: SignInSection | None = None) -> None:
        """Without `sessions` nobody can sign in to the page."""
        self._sign_in = sign_in or SignInSection()
        self._ledger = ledger
        self._sessions = sessions

    def admit(
        self,
        key: KeySection | None,
        prompt_bytes: int,
        limits: TokenLimits,
        context: ContextOf = _unknown,
        prices: PricesOf = _free,
        is_counted: bool = False,
    ) -> Reservation:
        if key is None:
            raise _no_key()
        account, budgets = self._ledger.account(key), self._ledger.budgets(key)
        context_tokens = context(limits.model) if account.has_budget or budgets else None
        estimate = Estimate(
            prompt_bytes,
            limits.completion_limit,
            limits.num_choices,
            context_tokens,
            prompt_bytes if is_counted else None,
            picture_tokens=limits.picture_tokens if prompt_bytes else 0,
        )
        return KeyedReservation(self._ledger, account, estimate, prices(limits.model) if budgets else NoPrices())

    def authenticate(self, request: Request) -> str:
        return self.key(request).name

    def key(self, request: Request) -> KeySection:
        """The key of a request, sent as OpenAI clients, as Anthropic clients or as the page sends it."""
        keyring = self._ledger.keyring
        authorization = request.header(b"authorization")
        if authorization is not None and authorization[:7].lower() == b"bearer ":
            return keyring.recognise(authorization[7:].strip().decode("latin-1"))
        if (key := request.header(b"x-api-key")) is not None:
            return keyring.recognise(key.decode("latin-1"))
        if self._sessions is not None and session_of(request) is not None:
            return self._sessions.recognise(keyring, request, self._sign_in)
        if (user := self._sign_in.proxied(request)) is not None:
            check_from_page(request)
            return self._sign_in.key_of(user)
        raise _no_key()

    def authenticate_operator(self, request: Request) -> str:
        key = self.key(request)
        check_operator(key)
        return key.name

    def sign_in(self, key_text: str) -> tuple[KeySection, str] | None:
        key = self._ledger.keyring.recognise(key_text)
        return (key, self._sessions.issue(key)) if self._sessions is not None else None


def has_credentials(request: Request) -> bool:
    """Whether the request has a key or a session, valid or not."""
    sent = request.header(b"authorization") or request.header(b"x-api-key")
    return sent is not None or session_of(request) is not None


def _no_key() -> InvalidAPIKey:
    return InvalidAPIKey("This gateway needs an API key: send `Authorization: Bearer …` or `x-api-key: …`.")


class KeysNeeded(SettingsError):
    """Everybody on the network could use the gateway; the message says what to do."""

    def __init__(self, address: Listen) -> None:
        super().__init__(
            f"the gateway would listen on {address} without keys, and anybody who can reach it could use it: add a key"
            f" with `cortex keys add NAME --config cortex.toml`, or set gateway.listen to 127.0.0.1:{address.port}, or"
            " admit everybody with gateway.open = true"
        )


class Metering:
    """Owns the ledger and the meter in force. Running requests settle with the meter that admitted them."""

    def __init__(self, directory: Path, tasks: Supervisor | None = None) -> None:
        """`tasks` runs what the ledger does regularly."""
        self.meter: Meter = OpenMeter()
        self._directory = directory
        self._tasks = tasks
        self._ledger: Ledger | None = None
        self._sessions: Sessions | None = None
        self._public_addresses: tuple[Listen, ...] = ()
        """A public address of any configuration so far: addresses stay in force until a restart."""

    @property
    def is_open(self) -> bool:
        """Whether every request is admitted without a key."""
        return isinstance(self.meter, OpenMeter)

    @property
    def sessions(self) -> Sessions | None:
        """None before `use`."""
        return self._sessions

    @property
    def ledger(self) -> Ledger | None:
        """The ledger; None on a gateway that never had keys."""
        return self._ledger

    async def use(self, config: Config) -> None:
        """Put the keys of `config` in force. Raises `StoreError` or `KeysNeeded`, and then nothing has changed.

        Without keys the gateway is open if `gateway.open` says so, or if it never had any and only this host reaches
        it, or `gateway.open_until_keys` is set. Otherwise nobody gets in: removing the last key must not admit
        everybody.
        """
        keyring = Keyring(with_models_of_groups(config.keys, config.groups))
        (sign_in,) = with_models_of_groups((config.sign_in,), config.groups)
        budgets = budgets_of(config.keys, config.groups)
        if self._ledger is not None:
            await self._ledger.use(keyring, budgets)
        elif config.keys or config.sign_in.is_enabled or (not config.gateway.open and await self._had_keys(config)):
            self._ledger = await self._open_ledger(config, keyring, budgets)
        is_open = not config.keys and not config.sign_in.is_enabled and (config.gateway.open or self._ledger is None)
        public = (*self._public_addresses, *config.public_addresses)
        if is_open and not (config.gateway.open or config.gateway.open_until_keys) and public:
            raise KeysNeeded(public[0])
        self._public_addresses = public[:1]
        if self._sessions is None:
            self._sessions = Sessions(config.state_directory(self._directory))
        self.meter = (
            OpenMeter() if is_open or self._ledger is None else KeyedMeter(self._ledger, self._sessions, sign_in)
        )

    async def _had_keys(self, config: Config) -> bool:
        """Whether the database has recorded keys. Creates none."""
        database = config.database(self._directory)
        if not is_url(database) and not Path(database).exists():
            return False
        store = await asyncio.to_thread(open_store, database)
        try:
            return await asyncio.to_thread(store.has_keys)
        finally:
            await asyncio.to_thread(store.close)

    async def _open_ledger(self, config: Config, keyring: Keyring, budgets: Mapping[str, tuple[Budget, ...]]) -> Ledger:
        store = await asyncio.to_thread(open_store, config.database(self._directory))
        unwritten = UnwrittenUsage(config.state_directory(self._directory))
        ledger = Ledger(store, keyring, budgets, flush_s=config.ledger.flush_s, tasks=self._tasks, unwritten=unwritten)
        try:
            await ledger.start()
        except BaseException:
            await asyncio.to_thread(store.close)
            raise
        return ledger

    async def close(self) -> None:
        """Write the remaining usage. Idempotent. Raises `StoreError` when that fails."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            await ledger.close()
