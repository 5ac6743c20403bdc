from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cortex.fleet.sleeping import WakeRules
from cortex.gateway.dispatch.nodes.waking import magic_packet, wake
from cortex.wire.errors import UpstreamUnavailable

from ....waiting import WAIT_S

MAC = bytes((0x0A, 0x1B, 0x2C, 0x3D, 0x4E, 0xFF))


@pytest.mark.parametrize("text", ["0a:1b:2c:3d:4e:ff", "0A-1B-2C-3D-4E-FF"])
def test_magic_packet_byte_by_byte(text: str) -> None:
    packet = magic_packet(text)
    assert len(packet) == 102
    assert packet[:6] == b"\xff\xff\xff\xff\xff\xff"
    assert [packet[start : start + 6] for start in range(6, 102, 6)] == [MAC] * 16


async def test_packet_is_sent_to_the_broadcast_address_and_port() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(WAIT_S)
        rules = WakeRules(mac="0a:1b:2c:3d:4e:ff", broadcast="127.0.0.1", port=receiver.getsockname()[1])
        await wake(rules)
        assert receiver.recv(2048) == magic_packet("0a:1b:2c:3d:4e:ff")


async def test_ipmi_gets_the_password_from_the_environment_and_not_as_an_argument(tmp_path: Path) -> None:
    tool, said = tmp_path / "ipmitool", tmp_path / "said"
    tool.write_text(f'#!/bin/sh\necho "$@" "$IPMI_PASSWORD" > {said}\n')
    tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BMC_PASSWORD": "secret"}
    rules = WakeRules(ipmi_host="bmc1", ipmi_user="root", ipmi_password_env="BMC_PASSWORD")
    await wake(rules, env)
    assert said.read_text() == "-I lanplus -H bmc1 -U root -E chassis power on secret\n"


@pytest.mark.parametrize(
    ("command", "why"),
    [(("sh", "-c", "echo no power >&2; exit 3"), "status 3: no power"), (("/no/such/tool",), "cannot be started")],
)
async def test_command_that_fails_says_why(command: tuple[str, ...], why: str) -> None:
    with pytest.raises(UpstreamUnavailable, match=why):
        await wake(WakeRules(command=command))


@pytest.mark.parametrize(
    "fields", [{}, {"mac": "0a:1b"}, {"mac": "0a:1b:2c:3d:4e:ff", "command": ("true",)}, {"ipmi_host": ""}]
)
def test_rules_need_exactly_one_valid_way(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"mac"):
        WakeRules(**fields)  # type: ignore[arg-type]
