"""Events: changes to a state machine, applied one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
M = TypeVar("M", bound="StateMachine")


class StateMachine(ABC):
    """A state that only events change. Everything runs on one thread."""

    def __init__(self) -> None:
        self._changes: deque[Callable[[], None]] = deque()
        self._is_applying = False

    @abstractmethod
    def _rebuild(self) -> None:
        """Update what is derived from the state. Called after every change."""

    @abstractmethod
    def _advance(self) -> None:
        """Act on the state. Called when no change is left."""

    def apply(self, change: Callable[[], None]) -> None:
        """Change the state, rebuild what depends on it, and advance.

        The one way in: every method marked `event` passes here. A call from inside (by another event, or by an effect
        or a delivery that reports at once) only queues its change. That is applied after the current one, in order,
        before the outer call returns.
        """
        self._changes.append(change)
        if self._is_applying:
            return
        self._is_applying = True
        try:
            while self._changes:
                self._changes.popleft()()
                self._rebuild()
                if not self._changes:
                    self._advance()
        finally:
            self._is_applying = False


def event(change: Callable[Concatenate[M, P], None]) -> Callable[Concatenate[M, P], None]:
    """A method that changes the state: a call passes `change` to `StateMachine.apply`."""

    @wraps(change)
    def apply(self: M, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.apply(partial(change, self, *args, **kwargs))

    return apply
