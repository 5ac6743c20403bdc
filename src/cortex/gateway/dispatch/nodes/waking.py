"""How a node that was suspended is woken: by a Wake-on-LAN packet, by its BMC, or by a command of the operator."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

from cortex.fleet.sleeping import WakeRules
from cortex.wire.errors import UpstreamUnavailable, shorten

COMMAND_TIMEOUT_S = 60.0


def magic_packet(mac: str) -> bytes:
    """Six bytes of ones, then the MAC address sixteen times."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "").replace("-", "")) * 16


async def wake(rules: WakeRules, env: Mapping[str, str] = os.environ) -> None:
    """Returns when the command was sent; the node responds later. Raises UpstreamUnavailable."""
    if rules.mac is not None:
        try:
            send_packet(rules)
        except OSError as problem:
            raise UpstreamUnavailable(f"the Wake-on-LAN packet cannot be sent: {problem}") from problem
        return
    command, added = rules.command, {}
    if rules.ipmi_host is not None:
        user = ("-U", rules.ipmi_user) if rules.ipmi_user else ()
        command = ("ipmitool", "-I", "lanplus", "-H", rules.ipmi_host, *user, "-E", "chassis", "power", "on")
        added = {"IPMI_PASSWORD": env.get(rules.ipmi_password_env or "", "")}
    await _run(command, {**env, **added})


def send_packet(rules: WakeRules) -> None:
    """Raises OSError."""
    assert rules.mac is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        out.sendto(magic_packet(rules.mac), (rules.broadcast, rules.port))


async def _run(command: tuple[str, ...], env: Mapping[str, str]) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as problem:
        raise UpstreamUnavailable(f"`{command[0]}` cannot be started: {problem}") from problem
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            _, said = await process.communicate()
    except TimeoutError:
        raise UpstreamUnavailable(f"`{command[0]}` did not end within {COMMAND_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        why = shorten(said.decode("utf-8", "replace").strip())
        raise UpstreamUnavailable(f"`{command[0]}` failed with status {process.returncode}: {why}")
