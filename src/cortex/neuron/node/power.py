"""Power: the draw of this host, attributed to running requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

RAPL = Path("/sys/class/powercap")
_MICRO = 1e6


class PackagePower:
    """Watts of the CPU packages, by RAPL: the difference of two readings of the energy counters. On most systems only
    root can read them. Blocks briefly."""

    def __init__(self, root: Path = RAPL) -> None:
        self._root = root
        self._last: tuple[float, dict[Path, int]] | None = None

    def read(self, now_s: float | None = None) -> float | None:
        """None before the second reading, and if nothing can be read."""
        now_s = time.monotonic() if now_s is None else now_s
        counters = {}
        for package in self._root.glob("intel-rapl:*"):
            if package.name.count(":") == 1:  # the others are parts of a package
                try:
                    counters[package] = int((package / "energy_uj").read_text())
                except (OSError, ValueError):
                    continue
        last, self._last = self._last, (now_s, counters) if counters else None
        if last is None or not counters or now_s <= last[0]:
            return None
        before_s, before = last
        used = sum(max(0, value - before[package]) for package, value in counters.items() if package in before)
        return used / _MICRO / (now_s - before_s)


class PowerUser(Protocol):
    """A loaded model."""

    @property
    def power_devices(self) -> tuple[int, ...]:
        """The devices that it runs on."""

    @property
    def num_running(self) -> int: ...

    def draws(self, watts: float) -> None:
        """Sets the total draw of its running requests from now on."""


def attribute(watts: Mapping[int, float], users: Iterable[PowerUser]) -> None:
    """Divides the power of each device among its running requests. An idle device's power is attributed to no one."""
    users = list(users)
    drawn = dict.fromkeys(range(len(users)), 0.0)
    for device, device_watts in watts.items():
        here = [index for index, user in enumerate(users) if device in user.power_devices]
        running = sum(users[index].num_running for index in here)
        for index in here if running else ():
            drawn[index] += device_watts * users[index].num_running / running
    for index, user in enumerate(users):
        user.draws(drawn[index])


class EnergyMeter:
    """Joules per request, with a model's power shared equally by its concurrent requests. Times are passed in."""

    def __init__(self) -> None:
        self._watts = 0.0
        self._each = 0.0
        """Joules of a hypothetical request running since the start."""
        self._at_s = 0.0

    def advance(self, now_s: float, num_running: int) -> float:
        """Brings `_each` up to date and returns it. Call it before the number of running requests or the watts change:
        it uses the number since the last call. A request's energy is the difference of two calls."""
        if num_running:
            self._each += self._watts * max(0.0, now_s - self._at_s) / num_running
        self._at_s = now_s
        return self._each

    def draws(self, watts: float) -> None:
        self._watts = watts
