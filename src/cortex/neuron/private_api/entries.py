"""An entry of the private API: one thing that a library may change without notice.

The probe runs on first use, once per process, and is cheap: does the name exist, does it take these arguments? Whether
the results are right is checked on the first use with a device. A failure is a warning in the log, a finding of
`doctor`, and part of the node's health; the caller uses its fallback.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Final, Literal

log = logging.getLogger(__name__)

DeviceKind = Literal["cuda", "cpu"]
ANY_DEVICE: Final[tuple[DeviceKind, ...]] = ("cuda", "cpu")


class Unusable(Exception):
    """A probe failed; the message says why."""


class PrivateEntry:
    """One thing that a library does not promise. Any thread may use it."""

    def __init__(
        self,
        name: str,
        fallback: str,
        probe: Callable[[], None],
        *,
        kinds: tuple[DeviceKind, ...] = ANY_DEVICE,
        applies: Callable[[], bool] = lambda: True,
        is_lazy: bool = False,
    ) -> None:
        """`name`: library and name, as a reader finds it. `fallback`: what happens without it. `probe`: raises if it
        cannot be used. `kinds`: of the devices that use it. `applies`: False where nothing uses it, which is no
        failure. `is_lazy`: the probe takes long, so that only uses and `doctor` run it."""
        self.name = name
        self.fallback = fallback
        self.kinds = kinds
        self.applies = applies
        self.is_lazy = is_lazy
        self._probe = probe
        self._lock = threading.Lock()
        self._is_probed = False
        self._problem: str | None = None
        self._passed: set[Hashable] = set()
        """The devices that it was checked on."""

    @property
    def is_usable(self) -> bool:
        """Whether it can be used, judged without a device."""
        if not self.applies():
            return False
        if not self._is_probed:
            with self._lock:
                if not self._is_probed:
                    self._check(self._probe)
                    self._is_probed = True
        return self._problem is None

    def usable_on(self, device: Hashable, check: Callable[[], None]) -> bool:
        """Whether it can be used, and works on this device: `check` raises if not. Raises errors of the device itself,
        and checks again next time."""
        if not self.is_usable:
            return False
        if device not in self._passed:
            with self._lock:
                self._check(check)
                self._passed.add(device)
        return self._problem is None

    def reject(self, reason: str) -> None:
        """It cannot be used from now on."""
        self._is_probed = True
        if self._problem is None:
            self._problem = reason
            log.warning("%s cannot be used: %s; instead: %s", self.name, reason, self.fallback)

    @property
    def problem(self) -> str | None:
        """Why it cannot be used; None: it can, or nothing has tried yet."""
        return self._problem

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:
            if is_of_the_device(error):
                raise
            self.reject(str(error).partition("\n")[0] or type(error).__name__)


def require(owner: object, *names: str) -> None:
    """Raises Unusable unless an object of a library has these attributes."""
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise Unusable(f"the installed version has no {', '.join(missing)}")


def is_of_the_device(error: BaseException) -> bool:
    """Whether an error says nothing about an entry: the device is out of memory, or has a fault. By name, because this
    module imports no library."""
    return type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") or "CUDA error" in str(error)
