"""Ports and links of the members of a group, between nodes that are addresses of this host."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
import pytest_asyncio

from cortex.http.ticker import Ticker
from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.harness.command.estimates import SizeOfModel
from cortex.neuron.node.harness.command.group import (
    GroupTimes,
    MemberLink,
    MemberPorts,
    check_reachable,
    interface_of,
)
from cortex.neuron.node.harness.command.host import CommandHost, ServerCommand, free_port
from cortex.neuron.node.harness.command.server_memory import ServerMemory
from cortex.neuron.servers.entry import HarnessEntry
from cortex.neuron.worker.model_host import LoadRejected
from cortex.wire.errors import GroupClaimed, LoadFailed
from cortex.wire.node.groups import GroupMember, MemberAddress

from .....waiting import NEVER_S, WAIT_S, until
from .commands import START, NotedSizes, servers

SECRET = "ab" * 16


class Members:
    """Three members of one group: `first` leads."""

    def __init__(self, times: GroupTimes) -> None:
        ports = [MemberPorts(f"127.0.0.{number}", times) for number in (1, 2, 3)]
        held = [each.hold(SECRET, "m") for each in ports]
        names = ("first", "second", "third")
        addresses = tuple(
            MemberAddress(node=name, host=host, port=port, pulse_port=pulse_port)
            for name, (host, port, pulse_port) in zip(names, held, strict=True)
        )
        self.members = [GroupMember(group=SECRET, rank=rank, members=addresses) for rank in range(3)]
        self.links = [each.take(member) for each, member in zip(ports, self.members, strict=True)]
        self.lost: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.ending: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    async def open(self, *ranks: int, checks_ports: bool = False) -> None:
        for rank in ranks:
            await self.links[rank].open(
                lambda reason, rank=rank: self.lost.put_nowait((rank, reason)),  # type: ignore[misc]
                lambda reason, rank=rank: self.ending.put_nowait((rank, reason)),  # type: ignore[misc]
                checks_ports=checks_ports,
            )

    async def losses(self, count: int) -> dict[int, str]:
        async with asyncio.timeout(WAIT_S):
            return dict([await self.lost.get() for _ in range(count)])


@pytest_asyncio.fixture(loop_scope="session")
async def members(request: pytest.FixtureRequest) -> AsyncIterator[Members]:
    made = Members(getattr(request, "param", GroupTimes()))
    yield made
    for link in made.links:
        link.end("the test is over")


async def test_end_of_a_member_ends_the_group_on_every_node_with_its_reason(members: Members) -> None:
    await members.open(1, 2, 0)
    members.links[2].end("its server (vllm) ended with status 1")
    lost = await members.losses(2)
    assert lost == {
        0: "on third: its server (vllm) ended with status 1",
        1: "on third: its server (vllm) ended with status 1",
    }


async def test_member_that_has_ended_tells_a_leader_that_comes_later(members: Members) -> None:
    await members.open(1, 2)
    members.links[1].end("its server (vllm) ended with status 2")
    with pytest.raises(LoadFailed, match=r"on second: its server \(vllm\) ended with status 2"):
        await members.open(0)


@pytest.mark.parametrize("members", [GroupTimes(pulse_s=NEVER_S, silence_s=0.2)], indirect=True)
async def test_silent_node_ends_the_group(members: Members) -> None:
    await members.open(1, 2, 0)
    assert "has sent nothing for" in " ".join((await members.losses(3)).values())


async def test_member_that_leaves_lets_the_leader_end_first(members: Members) -> None:
    await members.open(1, 2, 0)
    leaving = asyncio.create_task(members.links[1].leave("its node shuts down", WAIT_S))
    async with asyncio.timeout(WAIT_S):
        assert await members.ending.get() == (0, "on second: its node shuts down")
    assert not leaving.done()
    members.links[0].end("it was unloaded")
    async with asyncio.timeout(WAIT_S):
        await leaving


@pytest.mark.parametrize("members", [GroupTimes(leader_s=0.01)], indirect=True)
async def test_member_whose_leader_never_comes_ends(members: Members) -> None:
    await members.open(1)
    assert "the leader on first has not connected" in (await members.losses(1))[1]


async def test_peer_without_the_secret_is_disconnected(members: Members) -> None:
    await members.open(1)
    own = members.members[1].own
    for hello in (b"GET / HTTP/1.1\n", b"\n", SECRET[:-1].encode() + b"\n"):
        reader, writer = await asyncio.open_connection(own.host, own.pulse_port)
        writer.write(hello)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()
    assert members.lost.empty()
    await members.open(2, 0)


async def test_leader_that_cannot_be_reached_fails_the_load_of_a_member(members: Members) -> None:
    members.links[0].end("gone")
    with pytest.raises(LoadFailed, match=r"first cannot be reached at 127\.0\.0\.1:\d+ .*`cluster_address`.*firewalls"):
        await members.open(1)


async def test_leader_checks_the_ports_of_servers_that_listen(members: Members) -> None:
    await members.open(1, 2)
    with pytest.raises(LoadFailed, match="second cannot be reached"):
        await members.open(0, checks_ports=True)


async def test_leader_connects_to_all_ports_that_members_hold(members: Members) -> None:
    others = members.members[0].members[1:]
    for _ in range(40):
        await check_reachable(others)
    members.links[2].end("gone")
    with pytest.raises(LoadFailed, match=r"third cannot be reached at 127\.0\.0\.3:\d+ .*firewalls"):
        await check_reachable(others)


async def test_ports_of_a_load_that_fails_before_it_takes_them_are_free() -> None:
    ports = MemberPorts("127.0.0.1")
    ports.hold(SECRET, "m")
    ports.load_ended("m")
    ports.await_load(SECRET, "m")
    with pytest.raises(GroupClaimed):
        ports.hold("cd" * 16, "m")
    ports.load_ended("m")
    ports.hold("cd" * 16, "m")
    ports.close()


def is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


async def until_later_ports_are_free(times: GroupTimes) -> None:
    """Those that are held from now on: what was held before for as long would be free, too."""
    host, port, _ = MemberPorts("127.0.0.1", times).hold("ef" * 16, "another")
    await until(lambda: is_free(host, port))


async def test_ports_are_held_for_one_load_and_not_for_ever() -> None:
    ports = MemberPorts("127.0.0.1", GroupTimes(hold_s=0.01))
    host, port, pulse_port = held = ports.hold(SECRET, "m")
    assert ports.hold(SECRET, "m") == held
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, port))
    await until(lambda: is_free(host, port))
    address = MemberAddress(node="n", host=host, port=port, pulse_port=pulse_port)
    with pytest.raises(LoadFailed, match="not prepared on this node"):
        ports.take(GroupMember(group=SECRET, rank=0, members=(address, address)))
    socket.create_server((host, port)).close()


async def test_ports_are_held_while_a_version_is_read_and_while_a_load_waits() -> None:
    times = GroupTimes(hold_s=0.01)
    ports, num_reads = MemberPorts("127.0.0.1", times), 0

    async def read() -> str:
        nonlocal num_reads
        num_reads += 1
        await until_later_ports_are_free(times)
        return "1.2"

    held = ports.hold(SECRET, "m")
    assert await ports.version(SECRET, read) == await ports.version(SECRET, read) == "1.2"
    assert num_reads == 1
    ports.await_load(SECRET, "m")
    await until_later_ports_are_free(times)
    assert ports.hold(SECRET, "m") == held
    ports.close()


async def test_ports_are_free_when_the_version_cannot_be_read() -> None:
    async def read() -> str:
        raise LoadFailed("no version")

    ports = MemberPorts("127.0.0.1")
    ports.hold(SECRET, "m")
    with pytest.raises(LoadFailed, match="no version"):
        await ports.version(SECRET, read)
    ports.hold("cd" * 16, "m")
    ports.close()


async def test_ports_of_one_start_of_a_model_reject_another_one_until_they_are_released() -> None:
    ports, other = MemberPorts("127.0.0.1"), "cd" * 16
    ports.hold(SECRET, "m")
    with pytest.raises(GroupClaimed, match="another gateway"):
        ports.hold(other, "m")
    ports.hold(other, "another model")
    ports.release(other)
    ports.release(SECRET)
    ports.hold(other, "m")
    ports.close()


class EndingLink:
    """The link of a leader whose group ends before its server has started."""

    def __init__(self, member: GroupMember) -> None:
        self.member = member

    async def open(self, on_lost: Callable[[str], None], *_: object, checks_ports: bool) -> None:
        on_lost("on second: it has failed")

    def end(self, reason: str) -> None: ...


async def test_group_that_ends_while_the_server_of_its_leader_starts_fails_the_load(members: Members) -> None:
    link, start = EndingLink(members.members[0]), [*START[:-2], "--is-never-healthy", "--port"]
    host = CommandHost(
        "m",
        HarnessEntry(name="fake", cmd=START),
        ServerCommand(lambda port: [*start, str(port)], lambda *_: [], lambda _: os.environ),
        ServerMemory((0,), lambda: 0, 1),
        None,
        Ticker(asyncio.get_running_loop()),
        free_port,
        cast(SizeOfModel, NotedSizes()),
        link=cast(MemberLink, link),
    )
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(LoadRejected, match="was ended: on second: it has failed"):
            await host.load(cast(Any, Sink()))
    assert not servers()


class Sink:
    def on_progress(self, *_: object) -> None: ...
    def on_ending(self, reason: str) -> None: ...


async def test_node_without_a_cluster_address_prepares_nothing() -> None:
    with pytest.raises(LoadFailed, match="set `cluster_address`"):
        MemberPorts(None).hold(SECRET, "m")
    with pytest.raises(LoadFailed, match=r"no ports of cluster_address 192\.0\.2\.1 can be used"):
        MemberPorts("192.0.2.1").hold(SECRET, "m")


def test_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    ("address", "problem"),
    [("8.8.8.8", "not of a private network"), ("0.0.0.0", "not of a private network"), ("beast", "must be an address")],
)
def test_public_cluster_address_is_rejected(address: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        NeuronConfig(cluster_address=address)
    assert NeuronConfig(cluster_address="10.0.0.1").cluster_address == "10.0.0.1"
