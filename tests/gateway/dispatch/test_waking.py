from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cortex.fleet.sleeping import WakeRules
from cortex.gateway.dispatch.effects import magic_packet, wake
from cortex.wire.errors import UpstreamUnavailable

from ...waiting import WAIT_S

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


IN_NAMESPACE = """
import asyncio, socket, subprocess
from cortex.fleet.sleeping import WakeRules
from cortex.gateway.dispatch.effects import wake
for command in (
    "link add near type veth peer name far", "addr add 10.9.8.1/24 dev near", "link set near up", "link set far up"
):
    subprocess.run(["ip", *command.split()], check=True)
sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
sniffer.bind(("far", 0))
sniffer.settimeout(30)
asyncio.run(wake(WakeRules(mac="0a:1b:2c:3d:4e:ff", broadcast="10.9.8.255")))
while (frame := sniffer.recv(2048))[23] != socket.IPPROTO_UDP:
    pass
print(frame.hex())
"""


@pytest.mark.skipif(
    shutil.which("ip") is None
    or shutil.which("unshare") is None
    or subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs network namespaces",
)
def test_packet_reaches_every_host_of_the_network_as_an_ethernet_broadcast() -> None:
    ran = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", IN_NAMESPACE], capture_output=True, check=False, text=True
    )
    assert ran.returncode == 0, ran.stderr
    frame = bytes.fromhex(ran.stdout)
    assert frame[:6] == b"\xff" * 6, "to every host"
    assert frame[12:14] == b"\x08\x00"
    assert frame[30:34] == bytes((10, 9, 8, 255))
    assert int.from_bytes(frame[36:38], "big") == 9
    assert frame[42:144] == b"\xff" * 6 + MAC * 16
