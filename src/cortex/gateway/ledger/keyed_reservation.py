"""What one request of a key holds, from its admission until its usage is known."""

from __future__ import annotations

from cortex.gateway.ledger.estimate import Estimate
from cortex.gateway.ledger.groups import Budget, Prices, nano_per_token
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.ledger import Ledger
from cortex.gateway.ledger.limits import Account
from cortex.wire.errors import CortexError
from cortex.wire.events import Usage


class _Charge:
    """What one request holds of one budget beyond its key's."""

    __slots__ = ("account", "amount", "budget", "price")

    def __init__(self, budget: Budget, account: Account, price: int, amount: int) -> None:
        self.budget = budget
        self.account = account
        self.price = price
        self.amount = amount

    @property
    def token_limit(self) -> int | None:
        return self.amount // self.price if self.account.has_budget else None


class KeyedReservation:
    """Tokens of one request, reserved in the account of its key and in the other budgets that it is charged to."""

    __slots__ = ("_account", "_charges", "_estimate", "_ledger", "_prices", "_tokens", "token_limit")

    def __init__(self, ledger: Ledger, account: Account, estimate: Estimate, prices: Prices) -> None:
        """Raises what `Account.reserve` raises."""
        self._ledger = ledger
        self._account = account
        self._estimate = estimate
        self._prices = prices
        now, monotonic_now = ledger.clock(), ledger.monotonic()
        self._tokens = account.reserve(estimate, now, monotonic_now)
        self._charges: list[_Charge] = []
        try:
            for budget, other in ledger.budgets(account.key):
                price = nano_per_token(prices) if budget.is_cost else 1
                if price:  # a model without prices is free
                    amount = other.reserve(estimate, now, monotonic_now, price=price)
                    self._charges.append(_Charge(budget, other, price, amount))
        except CortexError:
            account.withdraw(self._tokens)
            for charge in self._charges:
                charge.account.withdraw(charge.amount)
            raise
        self.token_limit = self._limit()

    def _limit(self) -> int | None:
        own = self._tokens if self._account.has_budget else None
        limits = (own, *(charge.token_limit for charge in self._charges))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def principal(self) -> str:
        return self._account.key.name

    @property
    def key(self) -> KeySection:
        return self._account.key

    @property
    def is_tight(self) -> bool:
        return self.token_limit is not None and self.token_limit < self._estimate.most_tokens

    def max_prompt_tokens(self, most: int) -> int:
        return self._estimate.max_prompt_tokens(most)

    def extend(self, prompt_tokens: int) -> int | None:
        if self.token_limit is not None:
            self._estimate = self._estimate._replace(prompt_tokens=prompt_tokens)
            now = self._ledger.clock()
            if self._account.has_budget:
                self._tokens = self._account.extend(self._tokens, self._estimate, now)
            for charge in self._charges:
                if charge.account.has_budget:
                    charge.amount = charge.account.extend(charge.amount, self._estimate, now, price=charge.price)
            self.token_limit = self._limit()
        return self.token_limit

    def settle(self, usage: Usage | None, *, model: str, node: str) -> None:
        self._ledger.settle(self._account, self._tokens, usage, model=model, node=node)
        used = usage or Usage()
        for charge in self._charges:
            amount = charge.budget.amount(used.prompt_tokens + used.completion_tokens, used, self._prices)
            self._ledger.settle_budget(charge.account, charge.amount, amount)

    def cancel(self) -> None:
        """Return the tokens. The request still counts towards the key's requests per minute."""
        now = self._ledger.clock()
        self._account.settle(self._tokens, 0, now)
        for charge in self._charges:
            charge.account.settle(charge.amount, 0, now)
