"""Notifies systemd that a service is ready, that it stops, and regularly that its event loop runs.

Without a service manager (`NOTIFY_SOCKET` is absent) nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)

READY = b"READY=1"
STOPPING = b"STOPPING=1"
_ALIVE = b"WATCHDOG=1"


class ServiceManager:
    """The notifications of this process. Used on the loop's thread; sending never blocks."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]  # the abstract namespace
        self._watchdog_s = _watchdog_s(environment)

    def notify(self, state: bytes) -> None:
        """Send `state`. A failure is only logged; the manager handles a missing notification."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(state, self._address)
        except OSError as problem:
            log.warning("cannot notify the service manager: %s", problem)

    async def keep_alive(self) -> None:
        """Report that the event loop runs, three times in each interval of the watchdog. Returns at once without one;
        else cancel it."""
        while self._watchdog_s is not None:
            self.notify(_ALIVE)
            await asyncio.sleep(self._watchdog_s / 3)


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """The interval of the watchdog, if it watches this process."""
    interval = environment.get("WATCHDOG_USEC", "")
    is_other = environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid())
    return None if is_other or not interval.isdecimal() or int(interval) == 0 else int(interval) / 1e6
