"""The request path's view of the ledger: who the caller is, and what a request may use.

A `Meter` admits every request and records nothing. A `KeyedMeter` needs an API key for every request, reserves
tokens before the request runs and records its usage afterwards. `Metering` owns the ledger and picks the meter.

Meters and reservations are called on the event loop's thread and never wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cortex.gateway.config import Config
from cortex.gateway.database import Database
from cortex.gateway.ledger.groups import (
    Budget,
    Counters,
    NoPrices,
    Prices,
    budget_left,
    budgets_of,
    cost_id,
    cost_nano,
    group_id,
    nano_per_token,
    with_values_of_groups,
)
from cortex.gateway.ledger.key_store import KeysInForce, KeyStore, merged
from cortex.gateway.ledger.keys import Keyring, KeySection, check_operator
from cortex.gateway.ledger.ledger import Ledger, UnwrittenUsage
from cortex.gateway.ledger.limits import Account, Estimate
from cortex.gateway.ledger.sessions import Sessions, check_from_page, session_of
from cortex.gateway.ledger.store import SCHEMA, Counts, Slot, has_keys
from cortex.gateway.ledger.users import SignInSection
from cortex.http.request import Request
from cortex.settings import Listen, SettingsError
from cortex.system.tasks import Supervisor
from cortex.wire.errors import CortexError, InsufficientQuota, InvalidAPIKey
from cortex.wire.events import Usage
from cortex.wire.request_summary import RequestSummary

log = logging.getLogger(__name__)

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


class Reservation:
    """The tokens that one request holds, from its admission until its usage is known. Ends once, by `settle` or
    `cancel`. This one is charged to no one: on an open gateway, and for health checks of servers."""

    __slots__ = ("_key", "token_limit")

    def __init__(self, key: KeySection | None = None) -> None:
        self._key = key
        self.token_limit: int | None = None
        """The most tokens that the request may use, prompt and all choices together; None without a budget."""

    @property
    def key(self) -> KeySection | None:
        """The key that is charged, as it is now configured; None on an open gateway."""
        return self._key

    @property
    def principal(self) -> str:
        """The name of the key that is charged, for metrics and for the node."""
        return ANONYMOUS if self._key is None else self._key.name

    @property
    def may_end_response(self) -> bool:
        """Whether the budget may end the response before the client's limit or the model's context does."""
        return False

    def max_prompt_tokens(self, most: int) -> int:
        """An upper bound on the tokens of a prompt that has at most `most` by its size."""
        return most

    def extend(self, prompt_tokens: int) -> int | None:  # noqa: ARG002
        """Reserve enough for a prompt with this many tokens, and for a response; returns `token_limit`. Raises
        InsufficientQuota."""
        return self.token_limit

    def settle(self, usage: Usage | None, *, model: str, node: str) -> None:
        """Replace the reservation by `usage`; None when there was no response."""

    def cancel(self) -> None:
        """The request was rejected later: record nothing."""


class Meter:
    """Authenticates requests, admits them and records their usage. This one is an open gateway's: it admits every
    request and records nothing."""

    _reservation = Reservation()

    def admit(
        self,
        key: KeySection | None,  # noqa: ARG002
        prompt_bytes: int,  # noqa: ARG002
        limits: RequestSummary,  # noqa: ARG002
        context: ContextOf = _unknown,  # noqa: ARG002
        prices: PricesOf = _free,  # noqa: ARG002
        prompt_tokens: int | None = None,  # noqa: ARG002
    ) -> Reservation:
        """Reserve what a request of `key`, from `key()`, may use. Raises RateLimitExceeded or InsufficientQuota, and
        InvalidAPIKey if a required key is missing.

        `prompt_bytes` is 0 for a request that uses no tokens. `prompt_tokens`: where they are known before it runs.
        `context` and `prices` are called only where a key has a budget.
        """
        return self._reservation

    def authenticate(self, request: Request) -> str:
        """The principal of a request, from its headers alone. Raises InvalidAPIKey.

        This is the first check of every request, before its body is read: its cost does not depend on what the headers
        contain.
        """
        key = self.key(request)
        return ANONYMOUS if key is None else key.name

    def key(self, request: Request) -> KeySection | None:  # noqa: ARG002
        """The key of a request; None on an open gateway. Raises InvalidAPIKey."""
        return None

    def authenticate_operator(self, request: Request) -> str:
        """The principal of a request that changes the fleet. Raises InvalidAPIKey or OperatorOnly."""
        key = self.key(request)
        if key is None:
            return ANONYMOUS
        check_operator(key)
        return key.name

    def sign_in(self, key_text: str) -> tuple[KeySection, str] | None:  # noqa: ARG002
        """A key and a session of the page for its owner; None where there are none. Raises InvalidAPIKey."""
        return None


class _Charge:
    """One request's hold on one account: that of its key, which counts its tokens, or that of a budget beyond it."""

    __slots__ = ("account", "amount", "budget", "price")

    def __init__(self, budget: Budget | None, account: Account, price: int, amount: int) -> None:
        self.budget = budget
        self.account = account
        self.price = price
        """The amount of one token."""
        self.amount = amount

    def counts(self, usage: Usage, prices: Prices, saved_nano: int = 0) -> Counts:
        """What to record in the account. `saved_nano`: of the request, recorded once."""
        if self.budget is None:
            return Counts(requests=1, usage=usage, saved_nano=saved_nano)
        return Counts(requests=1, usage=Usage(completion_tokens=self.budget.amount(usage, prices)))


def _charges(
    ledger: Ledger,
    key: KeySection,
    prices: Prices,
    hold: Callable[[Account, int], int],
    undo: Callable[[Account, int], None],
) -> list[_Charge]:
    """A hold on every account that a request of `key` is charged to, the key's own first. `hold` takes an account and
    its price of a token, and returns the amount. If one raises, `undo` ends the others."""
    accounts: list[tuple[Budget | None, Account, int]] = [(None, ledger.account(key), 1)]
    for budget, account in ledger.budgets(key):
        if price := nano_per_token(prices) if budget.is_cost else 1:  # a model without prices is free
            accounts.append((budget, account, price))
    charges: list[_Charge] = []
    try:
        for owner, account, price in accounts:
            charges.append(_Charge(owner, account, price, hold(account, price)))
    except CortexError:
        for charge in charges:
            undo(charge.account, charge.amount)
        raise
    return charges


def _token_limit(charges: Iterable[_Charge]) -> int | None:
    """The least that the budgets of a request allow it; None without a budget."""
    return min((charge.amount // charge.price for charge in charges if charge.account.has_budget), default=None)


class KeyedReservation(Reservation):
    """Tokens of one request, reserved in the account of its key and in the other budgets that it is charged to."""

    __slots__ = ("_charges", "_estimate", "_ledger", "_prices")

    def __init__(self, ledger: Ledger, key: KeySection, estimate: Estimate, prices: Prices) -> None:
        """Raises what `Account.reserve` raises."""
        self._ledger = ledger
        self._estimate = estimate
        self._prices = prices
        now, monotonic_now = ledger.clock(), ledger.monotonic()

        def reserve(account: Account, price: int) -> int:
            return account.reserve(estimate, now, monotonic_now, price=price)

        self._charges = _charges(ledger, key, prices, reserve, Account.withdraw)
        self.token_limit = _token_limit(self._charges)

    @property
    def principal(self) -> str:
        return self.key.name

    @property
    def key(self) -> KeySection:
        return self._charges[0].account.key

    @property
    def may_end_response(self) -> bool:
        return self.token_limit is not None and self.token_limit < self._estimate.most_tokens

    def max_prompt_tokens(self, most: int) -> int:
        return self._estimate.max_prompt_tokens(most)

    def extend(self, prompt_tokens: int) -> int | None:
        if self.token_limit is not None:
            self._estimate = self._estimate._replace(prompt_tokens=prompt_tokens)
            now = self._ledger.clock()
            for charge in self._charges:
                if charge.account.has_budget:
                    charge.amount = charge.account.extend(charge.amount, self._estimate, now, price=charge.price)
            self.token_limit = _token_limit(self._charges)
        return self.token_limit

    def settle(self, usage: Usage | None, *, model: str, node: str) -> None:
        for charge in self._charges:
            slot = _slot(charge, self._ledger.clock(), model, node)
            self._ledger.settle(charge.account, charge.amount, slot, charge.counts(usage or Usage(), self._prices))

    def cancel(self) -> None:
        """Return the tokens. The request still counts towards the key's requests per minute."""
        now = self._ledger.clock()
        for charge in self._charges:
            charge.account.settle(charge.amount, 0, now)


def _slot(charge: _Charge, now: float, model: str, node: str) -> Slot:
    """The row that a charge is added to."""
    key = charge.account.key
    model, node = (model, node) if charge.budget is None else ("", "")
    return Slot.at(now, key_id=key.id, key_name=key.name, model=model, node=node, key_group=key.group or "")


class LineReservation(Reservation):
    """The hold of one batch line. The charge is written with the result, in one transaction, so that a line that runs
    twice is charged once: `spend` has the charge, `end` ends the hold."""

    __slots__ = ("_charges", "_clock", "_estimate", "_full_prices", "_prices", "is_exhausted", "model", "node", "usage")

    def __init__(
        self, ledger: Ledger | None, key: KeySection | None, estimate: Estimate, prices: Prices, price: float
    ) -> None:
        """`ledger` is None on an open gateway. `price`: the part of `prices` that batches cost. Raises
        InsufficientQuota."""
        super().__init__(key)
        self.usage: Usage | None = None
        """What it has used, once it is known."""
        self.model = self.node = ""
        self.is_exhausted = False
        """Whether its budget has too little left for it, however long it waits."""
        self._estimate = estimate
        self._full_prices = prices
        self._prices = NoPrices(prices.input * price, prices.cached_input * price, prices.output * price)
        self._clock = time.time if ledger is None else ledger.clock
        self._charges: list[_Charge] = []
        if ledger is not None and key is not None:
            now = self._clock()

            def hold(account: Account, price: int) -> int:
                return account.hold(estimate, now, price=price)

            def undo(account: Account, amount: int) -> None:
                account.end_hold(amount, 0, now)

            self._charges = _charges(ledger, key, self._prices, hold, undo)
        self.token_limit = _token_limit(self._charges)

    @property
    def cost_nano(self) -> int:
        """What its usage costs, at the price of a batch."""
        return cost_nano(self._prices, self.usage or Usage())

    @property
    def may_end_response(self) -> bool:
        return self.token_limit is not None and self.token_limit < self._estimate.most_tokens

    def max_prompt_tokens(self, most: int) -> int:
        return self._estimate.max_prompt_tokens(most)

    def extend(self, prompt_tokens: int) -> int | None:
        if self.token_limit is None:
            return None
        self._estimate = self._estimate._replace(prompt_tokens=prompt_tokens)
        now = self._clock()
        try:
            for charge in self._charges:
                if charge.account.has_budget:
                    charge.amount = charge.account.extend_hold(charge.amount, self._estimate, now, price=charge.price)
        except InsufficientQuota as error:
            self.is_exhausted = error.retry_after_s is None
            raise
        self.token_limit = _token_limit(self._charges)
        return self.token_limit

    def settle(self, usage: Usage | None, *, model: str, node: str) -> None:
        """Neither this nor `cancel` ends the hold: the batch does."""
        self.usage, self.model, self.node = usage, model, node

    def spend(self) -> dict[Slot, Counts]:
        """The rows to record with its result."""
        now, used = self._clock(), self.usage or Usage()
        saved_nano = cost_nano(self._full_prices, used) - self.cost_nano
        return {
            _slot(charge, now, self.model, self.node): charge.counts(used, self._prices, saved_nano)
            for charge in self._charges
        }

    def end(self, *, is_recorded: bool) -> None:
        """End what it holds. `is_recorded`: the database has `spend`. Call it once."""
        now, recorded = self._clock(), self.spend() if is_recorded else {}
        tokens = {slot.key_id: counts.tokens for slot, counts in recorded.items()}
        for charge in self._charges:
            charge.account.end_hold(charge.amount, tokens.get(charge.account.key.id, 0), now)


class KeyedMeter(Meter):
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
        limits: RequestSummary,
        context: ContextOf = _unknown,
        prices: PricesOf = _free,
        prompt_tokens: int | None = None,
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
            prompt_tokens,
            picture_tokens=limits.picture_tokens if prompt_bytes else 0,
        )
        return KeyedReservation(self._ledger, key, estimate, prices(limits.model) if budgets else NoPrices())

    def key(self, request: Request) -> KeySection:
        """The key of a request, from the headers of OpenAI or Anthropic clients or from the page's session."""
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
    """The gateway would be open to the network; the message says what to do."""

    def __init__(self, address: Listen) -> None:
        super().__init__(
            f"the gateway would listen on {address} without keys, and anybody who can reach it could use it: add a key"
            f" with `cortex keys add NAME --config cortex.toml`, or set gateway.listen to 127.0.0.1:{address.port}, or"
            " admit everybody with gateway.open = true"
        )


class BudgetLevel(NamedTuple):
    """One limit, for metrics."""

    kind: str
    """`key` or `group`."""
    name: str
    unit: str
    """`tokens` or `cost`."""
    period: str
    """`window` or `balance`."""
    limit: float
    left: float


class Metering:
    """Owns the ledger and the meter in force. Running requests settle with the meter that admitted them."""

    def __init__(self, directory: Path, database: Database, tasks: Supervisor | None = None) -> None:
        """Relative paths of the configuration start at `directory`. `tasks` runs what the ledger does regularly."""
        self.meter = Meter()
        self._directory = directory
        self._database = database.use(SCHEMA)
        self.key_store = KeyStore(database)
        self.in_force = KeysInForce()
        """The keys and groups of the file and of the database."""
        self._tasks = tasks
        self.ledger: Ledger | None = None
        """None on a gateway that never had keys."""
        self.sessions: Sessions | None = None
        """None before `use`."""
        self._public_addresses: tuple[Listen, ...] = ()
        """A public address of any configuration since the start: addresses stay bound until a restart."""

    @property
    def is_open(self) -> bool:
        """Whether every request is admitted without a key."""
        return not isinstance(self.meter, KeyedMeter)

    async def use(self, config: Config) -> None:
        """Put the keys of `config` and of the database in force. Raises `StoreError` or `KeysNeeded`, and then nothing
        has changed.

        Without keys the gateway is open if `gateway.open` says so, or if it never had any and only this host reaches
        it, or `gateway.open_until_keys` is set. Otherwise nobody gets in: removing the last key must not admit
        everybody.
        """
        in_force = merged(config.keys, config.groups, await self.key_store.read())
        keys, groups = in_force.keys, in_force.groups
        keyring = Keyring(with_values_of_groups(keys, groups))
        (sign_in,) = with_values_of_groups((config.sign_in,), groups)
        budgets = budgets_of(keys, groups)
        if self.ledger is not None:
            await self.ledger.use(keyring, budgets)
        elif keys or config.sign_in.is_enabled or (not config.gateway.open and await self._had_keys()):
            self.ledger = await self._open_ledger(config, keyring, budgets)
        is_open = not keys and not config.sign_in.is_enabled and (config.gateway.open or self.ledger is None)
        public = (*self._public_addresses, *config.public_addresses)
        if is_open and not (config.gateway.open or config.gateway.open_until_keys) and public:
            raise KeysNeeded(public[0])
        self._public_addresses = public[:1]
        if in_force.ignored != self.in_force.ignored:
            for what in in_force.ignored:
                log.warning("not in force, although it is in the database: %s", what)
        self.in_force = in_force
        if self.sessions is None:
            self.sessions = Sessions(config.state_directory(self._directory))
        self.meter = Meter() if is_open or self.ledger is None else KeyedMeter(self.ledger, self.sessions, sign_in)

    def budget_levels(self) -> Iterator[BudgetLevel]:
        """Every limit of every key and group, and what this gateway knows to be left of it."""
        if self.ledger is None:
            return
        counters, none = self.ledger.known_counters(), Counters()
        for owner in self.in_force.owners:
            kind, id = ("key", owner.id) if isinstance(owner, KeySection) else ("group", group_id(owner.name))
            left = budget_left(owner, counters.get(id, none), counters.get(cost_id(owner), none))
            for unit in ("tokens", "cost"):
                for period in ("window", "balance"):
                    limit, rest = getattr(owner, f"{period}_{unit}"), left[f"{period}_left_{unit}"]
                    if limit is not None and rest is not None:
                        yield BudgetLevel(kind, owner.name, unit, period, limit, rest)

    async def have_keys_changed(self) -> bool:
        """Whether the keys of the database have been edited since `use`, here or by another program. Raises
        `StoreError`."""
        return await self.key_store.revision() != self.in_force.revision

    async def _had_keys(self) -> bool:
        """Whether the database has recorded keys. Creates none."""
        return self._database.exists and await self._database.do(has_keys)

    async def _open_ledger(self, config: Config, keyring: Keyring, budgets: Mapping[str, tuple[Budget, ...]]) -> Ledger:
        unwritten = UnwrittenUsage(config.state_directory(self._directory))
        flush_s = config.ledger.flush_s
        ledger = Ledger(self._database, keyring, budgets, flush_s=flush_s, tasks=self._tasks, unwritten=unwritten)
        await ledger.start()
        return ledger

    async def close(self) -> None:
        """Write the remaining usage. Idempotent. Raises `StoreError` when that fails."""
        ledger, self.ledger = self.ledger, None
        if ledger is not None:
            await ledger.close()
