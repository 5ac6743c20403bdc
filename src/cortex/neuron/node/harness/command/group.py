"""The members of groups on this node: servers that run one model together with those of other nodes.

A member's life: `MemberPorts.prepare` chooses two ports of `cluster_address` and holds them. Its load takes them over
as a `MemberLink`, which connects the nodes of the group before the server starts, and watches them until it ends. The
leader's node connects to every other one. Each side sends a line at an interval; a side that ends gives the reason in
its last line. A connection that ends, or is silent for too long, ends the member, so a group ends everywhere as soon as
a member, node or network fails, with or without a gateway. Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from cortex.system.tasks import run_once
from cortex.wire.errors import GroupClaimed, LoadFailed, shorten
from cortex.wire.node.groups import MAX_NODES, GroupMember, MemberAddress, of_node
from cortex.wire.words import os_error_in_words

CONNECT_S = 5.0
LINGER_S = 10.0
_HELLO_S = 5.0
_LINE_BYTES = 8 << 10
_SIOCGIFADDR = 0x8915
_ALIVE = b".\n"
_END = b"!"
_LEAVES = b"~"


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """How long the members of a group wait for each other."""

    pulse_s: float = 2.0
    silence_s: float = 12.0
    """Another node that has sent no line for this long is lost."""
    hold_s: float = 120.0
    """How long ports are held until the load is ordered or the member is prepared again."""
    load_s: float = 3600.0
    """How long they are held for an ordered load."""
    leader_s: float = 180.0
    """How long a member waits for the leader's node, which loads last, before it ends."""


def interface_of(address: str) -> str | None:
    """The network interface that has the address; None if none has."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                number, *_, name = line.split()
                if int(number, 16) == int(wanted):
                    return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                reply = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if reply[20:24] == wanted.packed:
                    return name
    return None


class MemberPorts:
    """The ports that this node has promised to groups, by group."""

    def __init__(self, address: str | None, times: GroupTimes | None = None) -> None:
        """`address`: `cluster_address`."""
        self.address = address
        self._times = times or GroupTimes()
        self._held: dict[str, _HeldPorts] = {}
        self._ordered: dict[str, str] = {}
        """By model: the group whose load was ordered."""

    def hold(self, group: str, model_id: str) -> tuple[str, int, int]:
        """The address and the two ports of a member, held for `hold_s` from now on. Raises LoadFailed, and GroupClaimed
        while they are held for another start of the model."""
        if self.address is None:
            raise LoadFailed("this node takes no part in groups: set `cluster_address` in its neuron.toml")
        if any(held.model_id == model_id for other, held in self._held.items() if other != group):
            raise GroupClaimed(f"{shorten(model_id)} is being started by another gateway")
        if group not in self._held:
            try:
                self._held[group] = _HeldPorts(self.address, model_id)
            except OSError as error:
                why = os_error_in_words(error)
                raise LoadFailed(f"no ports of cluster_address {self.address} can be used: {why}") from error
        held = self._held[group]
        held.expire_after(self._times.hold_s, lambda: self.release(group))
        return self.address, *held.numbers

    def await_load(self, group: str, model_id: str) -> None:
        """Its load was ordered, but may have to wait for other loads."""
        self._ordered[model_id] = group
        if (held := self._held.get(group)) is not None:
            held.expire_after(self._times.load_s, lambda: self.release(group))

    def load_ended(self, model_id: str) -> None:
        """The load failed, or the model was unloaded since: free the ports that it has not taken."""
        if (group := self._ordered.pop(model_id, None)) is not None:
            self.release(group)

    async def version(self, group: str, read: Callable[[], Awaitable[str]]) -> str:
        """The result of `read`, which may take long and is called once while the ports are held."""
        held = self._held[group]
        if held.version is None:
            held.keep()
            try:
                held.version = await read()
            except BaseException:
                self.release(group)
                raise
            if group in self._held:
                held.expire_after(self._times.hold_s, lambda: self.release(group))
        return held.version

    def take(self, member: GroupMember) -> MemberLink:
        """Raises LoadFailed if its ports are not held here."""
        held = self._held.pop(member.group, None)
        if held is None or (member.own.host, *held.numbers) != (self.address, member.own.port, member.own.pulse_port):
            if held is not None:
                held.close()
            raise LoadFailed("the group of the model is not prepared on this node; its gateway must start it again")
        held.keep()
        return MemberLink(member, held, self._times)

    def close(self) -> None:
        while self._held:
            self._held.popitem()[1].close()

    def release(self, group: str) -> None:
        """Idempotent."""
        if (held := self._held.pop(group, None)) is not None:
            held.close()


class _HeldPorts:
    """Two ports on which this node listens: the server's, so that others can check that they reach it, and the one for
    pulses."""

    def __init__(self, address: str, model_id: str) -> None:
        """Raises OSError."""
        self.model_id = model_id
        self.version: str | None = None
        """Version of its server; None until read."""
        self._expiry: asyncio.TimerHandle | None = None
        with contextlib.ExitStack() as opened:
            self.server, self.pulse = (opened.enter_context(_listening(address)) for _ in range(2))
            opened.pop_all()

    @property
    def numbers(self) -> tuple[int, int]:
        return self.server.getsockname()[1], self.pulse.getsockname()[1]

    def expire_after(self, seconds: float, expire: Callable[[], None]) -> None:
        """Replaces the previous expiry."""
        self.keep()
        self._expiry = asyncio.get_running_loop().call_later(seconds, expire)

    def keep(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()

    def close(self) -> None:
        self.keep()
        self.server.close()
        self.pulse.close()


class MemberLink:
    """The connections of one member to the nodes of its group, from its load to its end."""

    def __init__(self, member: GroupMember, held: _HeldPorts, times: GroupTimes) -> None:
        self.member = member
        self._times = times
        self._held = held
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_lost: Callable[[str], None] = lambda _: None
        self._on_ending: Callable[[str], None] = lambda _: None
        self._ended = asyncio.Event()
        self._last_line = b""

    async def open(
        self, on_lost: Callable[[str], None], on_ending: Callable[[str], None], *, checks_ports: bool
    ) -> None:
        """Connects to the other nodes, where that is possible before the server starts, and frees the server's port.
        `on_lost` is called once, with the reason, when the group has ended; `on_ending` when another member will end as
        soon as this one, the leader, has no requests. `checks_ports`: the servers of the other members already listen.
        Raises LoadFailed if a node cannot be reached."""
        self._on_lost, self._on_ending = on_lost, on_ending
        if self.member.is_leader:
            for other in self.member.members[1:]:
                if checks_ports:
                    _, probe = await _connected(other, other.port)
                    probe.close()
                await self._join(other)
        else:
            _, probe = await _connected(self.member.leader, self.member.leader.port)
            probe.close()
            self._server = await asyncio.start_server(self._accept, sock=self._held.pulse, limit=_LINE_BYTES)
            self._run(self._await_leader(), "wait for the leader of a group")
        self._held.server.close()

    async def _join(self, other: MemberAddress) -> None:
        """Raises LoadFailed, also for a member that has ended since its load."""
        reader, writer = await _connected(other, other.pulse_port)
        writer.write(self.member.group.encode() + b"\n")
        try:
            async with asyncio.timeout(CONNECT_S):
                line = await reader.readline()
        except (OSError, ValueError):  # a timeout too
            line = b""
        if line != _ALIVE:
            writer.close()
            raise LoadFailed(_reason(other.node, line))
        self._watch(reader, writer, other.node)

    def end(self, reason: str) -> None:
        """Informs the other nodes and closes all connections. A leader that connects within `LINGER_S` gets the reason
        too. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._last_line = _END + reason.replace("\n", " ").encode()[: _LINE_BYTES // 2] + b"\n"
        if self._server is None:
            self._held.close()
        else:
            delay_s = 0.0 if self._writers else LINGER_S
            asyncio.get_running_loop().call_later(delay_s, self._server.close)
        for writer in self._writers:
            if not writer.is_closing():
                writer.write(self._last_line)
                writer.close()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def leave(self, reason: str, timeout_s: float) -> None:
        """Announces the end of this member and waits for the end of the group."""
        for writer in self._writers:
            writer.write(_LEAVES + reason.encode() + b"\n")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s if self._writers else 0):
                await self._ended.wait()

    def _lose(self, reason: str) -> None:
        if not self._ended.is_set():
            self.end(reason)
            self._on_lost(reason)

    async def _await_leader(self) -> None:
        leader_s = self._times.leader_s
        await asyncio.sleep(leader_s)
        if not self._writers:
            self._lose(f"the leader on {self.member.leader.node} has not connected within {leader_s:.0f} s")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = await reader.readline()
        except (OSError, ValueError):  # a timeout too
            hello = b""
        is_leader = hmac.compare_digest(hello.strip(), self.member.group.encode())
        if not is_leader or self._writers or self._ended.is_set():
            if is_leader:
                writer.write(self._last_line)
            writer.close()
            return
        self._watch(reader, writer, self.member.leader.node)

    def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: str) -> None:
        self._writers.add(writer)
        self._run(self._send(writer), f"pulse to {node}")
        self._run(self._read(reader, node), f"pulse of {node}")

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # found by the reader
            while not writer.is_closing():
                writer.write(_ALIVE)
                await writer.drain()
                await asyncio.sleep(self._times.pulse_s)

    async def _read(self, reader: asyncio.StreamReader, node: str) -> None:
        line, silence_s = _ALIVE, self._times.silence_s
        try:
            while line and not line.startswith(_END):
                async with asyncio.timeout(silence_s):
                    line = await reader.readline()
                if line.startswith(_LEAVES):
                    self._on_ending(_reason(node, line))
        except TimeoutError:
            self._lose(f"{node} has sent nothing for {silence_s:.0f} s")
        except (OSError, ValueError):
            line = b""
        self._lose(_reason(node, line))

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = run_once(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _reason(node: str, line: bytes) -> str:
    """Why a connection ended, by its last line."""
    text = line[1:].decode(errors="replace").strip()
    return of_node(node, text) if text else f"the connection to {node} ended"


async def check_reachable(members: Sequence[MemberAddress]) -> None:
    """Connects to the ports that these members hold on their nodes. Raises LoadFailed."""
    ports = [(member, port) for member in members for port in (member.port, member.pulse_port)]
    for outcome in await asyncio.gather(*starmap(_connected, ports), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        outcome[1].close()


async def _connected(member: MemberAddress, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises LoadFailed."""
    try:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(member.host, port, limit=_LINE_BYTES)
    except OSError as error:
        why = "no response" if isinstance(error, TimeoutError) else os_error_in_words(error)
        raise LoadFailed(
            f"{member.node} cannot be reached at {member.host}:{port} ({why}); check its `cluster_address`, and that "
            "firewalls let the nodes of a group reach each other on all ports"
        ) from error


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its server takes the port at once
        listener.bind((address, 0))
        listener.listen(2 * MAX_NODES)  # connections that check a server's port are never accepted
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
