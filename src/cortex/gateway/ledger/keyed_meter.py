"""The meter of a gateway with keys: recognises the caller, reserves, settles. On the request path; never waits."""

from __future__ import annotations

from cortex.gateway.ledger.keys import Keyring, KeySection, check_model, check_operator
from cortex.gateway.ledger.ledger import Ledger
from cortex.gateway.ledger.limits import Account
from cortex.gateway.ledger.meter import Estimate
from cortex.http.request import Request
from cortex.wire.errors import InvalidAPIKey
from cortex.wire.events import Usage


class KeyedReservation:
    """A reservation of one request. Ends exactly once."""

    __slots__ = ("_account", "_ledger", "_reserved")

    def __init__(self, ledger: Ledger, account: Account, reserved: int) -> None:
        self._ledger = ledger
        self._account = account
        self._reserved = reserved

    @property
    def principal(self) -> str:
        """The key's name, for metrics and the node."""
        return self._account.key.name

    def check_model(self, model: str) -> None:
        """Raise `ModelNotAllowed` when the key is not for `model`."""
        check_model(self._account.key, model)

    def settle(self, usage: Usage | None, *, model: str, node: str, request_id: str) -> None:  # noqa: ARG002
        """Record what was really used; None when the request ended without a response."""
        self._ledger.settle(self._account, self._reserved, usage, model=model, node=node)

    def settle_in_full(self, *, model: str, node: str) -> None:
        """Record the whole reservation as used."""
        used = Usage(completion_tokens=self._reserved)
        self._ledger.settle(self._account, self._reserved, used, model=model, node=node)

    def cancel(self) -> None:
        """Give the tokens back. The request still counts towards the key's rate: rejecting it was work."""
        self._account.settle(self._reserved, 0, self._ledger.clock())


class KeyedMeter:
    """Every request needs a key, and pays with it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def admit(self, request: Request, estimate: Estimate) -> KeyedReservation:
        """Reserve what the request may cost. Raises `InvalidAPIKey`, `RateLimitExceeded` or `InsufficientQuota`."""
        account = self._ledger.account(recognise(self._ledger.keyring, request))
        reserved = account.reserve(estimate, self._ledger.clock())
        return KeyedReservation(self._ledger, account, reserved)

    def authenticate(self, request: Request) -> str:
        """The principal of a request, from its headers alone. Raises `InvalidAPIKey`."""
        return recognise(self._ledger.keyring, request).name

    def authenticate_operator(self, request: Request) -> str:
        """The principal of a request that changes the fleet. Raises `InvalidAPIKey` or `OperatorOnly`."""
        key = recognise(self._ledger.keyring, request)
        check_operator(key)
        return key.name


def recognise(keyring: Keyring, request: Request) -> KeySection:
    """The key that a client sent, the OpenAI way or the Anthropic way. Raises `InvalidAPIKey`."""
    authorization = request.header(b"authorization")
    if authorization is not None and authorization[:7].lower() == b"bearer ":
        return keyring.recognise(authorization[7:].strip().decode("latin-1"))
    if (key := request.header(b"x-api-key")) is not None:
        return keyring.recognise(key.decode("latin-1"))
    raise InvalidAPIKey("This gateway needs an API key: send `Authorization: Bearer …` or `x-api-key: …`.")
