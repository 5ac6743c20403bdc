"""Notifications of systemd, on a socket of the test."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from cortex.system.service_manager import READY, ServiceManager

from ..waiting import WAIT_S


async def test_reports_readiness_and_a_running_loop(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.setblocking(False)
        environment = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}
        service = ServiceManager(environment)
        service.notify(READY)
        alive = asyncio.create_task(service.keep_alive())
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_S):
            assert [await loop.sock_recv(manager, 99) for _ in range(3)] == [READY, b"WATCHDOG=1", b"WATCHDOG=1"]
        alive.cancel()


@pytest.mark.parametrize("environment", [{}, {"WATCHDOG_USEC": "30", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "x"}])
async def test_without_a_manager_nothing_is_sent(environment: dict[str, str]) -> None:
    service = ServiceManager(environment)
    service.notify(READY)
    await service.keep_alive()
