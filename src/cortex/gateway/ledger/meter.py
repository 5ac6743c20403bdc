"""The meter of a gateway with keys: recognises the caller, reserves, settles. On the request path; never waits."""

from __future__ import annotations

from cortex.gateway.http.request import Request
from cortex.wire.errors import InvalidAPIKey
from cortex.wire.events import Usage

from .book import Book
from .keys import KeySection, check_model, check_operator
from .limits import Account

BYTES_PER_TOKEN = 4
DEFAULT_COMPLETION_TOKENS = 1024
"""Reserved for a request that sets no limit of its own."""


class KeyedHold:
    """A reservation of one request. `settle` is called exactly once."""

    __slots__ = ("_account", "_book", "_reserved")

    def __init__(self, book: Book, account: Account, reserved: int) -> None:
        self._book = book
        self._account = account
        self._reserved = reserved

    @property
    def principal(self) -> str:
        """The key's name, for metrics and the node."""
        return self._account.key.name

    def settle(self, usage: Usage | None, *, model: str, node: str, request_id: str) -> None:  # noqa: ARG002
        """Book what was really used; None when the request ended without an answer."""
        self._book.settle(self._account, self._reserved, usage, model=model, node=node)


class KeyedMeter:
    """Every request needs a key, and pays with it."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def admit(self, request: Request, *, model: str, prompt_bytes: int, completion_limit: int | None) -> KeyedHold:
        """Reserve what the request may cost: its prompt, judged by size, and the completion it asks for.

        Raises `InvalidAPIKey`, `ModelNotAllowed`, `RateLimitExceeded` or `InsufficientQuota`.
        """
        key = self._recognise(request)
        check_model(key, model)
        account = self._book.account(key)
        completion = DEFAULT_COMPLETION_TOKENS if completion_limit is None else completion_limit
        reserved = account.reserve(prompt_bytes // BYTES_PER_TOKEN + completion, self._book.clock())
        return KeyedHold(self._book, account, reserved)

    def authenticate(self, request: Request) -> str:
        """The principal of a request that costs nothing. Raises `InvalidAPIKey`."""
        return self._recognise(request).name

    def authenticate_operator(self, request: Request) -> str:
        """The principal of a request that changes the fleet. Raises `InvalidAPIKey` or `OperatorOnly`."""
        key = self._recognise(request)
        check_operator(key)
        return key.name

    def _recognise(self, request: Request) -> KeySection:
        return self._book.keyring.recognise(presented_key(request))


def presented_key(request: Request) -> str:
    """The key a client sent, the OpenAI way or the Anthropic way. Raises `InvalidAPIKey` when there is none."""
    authorization = request.header(b"authorization")
    if authorization is not None and authorization[:7].lower() == b"bearer ":
        return authorization[7:].strip().decode("latin-1")
    if (key := request.header(b"x-api-key")) is not None:
        return key.decode("latin-1")
    raise InvalidAPIKey("This gateway needs an API key: send `Authorization: Bearer …` or `x-api-key: …`.")
