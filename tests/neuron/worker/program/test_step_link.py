"""Plans between hosts: over a port that unauthenticated peers may reach as well."""

from __future__ import annotations

import queue
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.neuron.engine.errors import GroupBroken
from cortex.neuron.engine.parallel import arrivals, ports
from cortex.neuron.engine.request import RankSpec, RendezvousAddress
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.worker.program import step_link
from cortex.neuron.worker.program.step_link import FollowerLink, LeaderLink

from ....ports import free_port
from ....waiting import WAIT_S

SECRET = "s" * 32


@pytest.fixture
def port() -> int:
    return free_port()


def rank(number: int, port: int, secret: str = SECRET) -> RankSpec:
    return RankSpec(number, 2, "", rendezvous=RendezvousAddress("127.0.0.1", 0, port, secret, f"127.0.0.{number + 1}"))


def assert_only_ranks_are_served(leader: LeaderLink, port: int, peers: list[socket.socket]) -> None:
    """A rank that connects now gets a plan, and the other peers are disconnected. Closes all of them."""
    plans: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
    follower = FollowerLink(rank(1, port), plans.put, lambda: None)
    follower.open()
    leader.announce(StepPlan((), 0, (), ()))
    assert plans.get(timeout=WAIT_S).rows == ()
    for peer in peers:
        assert len(peer.recv(64, socket.MSG_WAITALL)) <= 32  # the nonce, and then the end
        peer.close()
    with pytest.raises(ConnectionRefusedError):  # all ranks have arrived
        socket.create_connection(("127.0.0.1", port))
    follower.close()
    leader.close()


def test_leader_announces_to_ranks_and_closes_connections_without_the_secret(port: int) -> None:
    leader = LeaderLink(rank(0, port), lambda: None)
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    peers[0].sendall(b"x" * 64)
    peers[1].shutdown(socket.SHUT_WR)
    assert_only_ranks_are_served(leader, port, peers)


def test_silent_peers_delay_no_rank(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_link, "CONNECT_S", 1000.0)
    monkeypatch.setattr(arrivals, "MAX_UNAUTHENTICATED", 4)
    leader = LeaderLink(rank(0, port), lambda: None)
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    peers[-1].sendall(SECRET[:-1].encode())
    assert_only_ranks_are_served(leader, port, peers)


def test_port_that_is_held_for_the_load_is_free_for_its_leader_alone() -> None:
    plans: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
    with ports.held("127.0.0.1") as held:
        port = int(held.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        leader = LeaderLink(rank(0, port), lambda: None)
        follower = FollowerLink(rank(1, port), plans.put, lambda: None)
        follower.open()
        leader.announce(StepPlan((), 0, (), ()))
        assert plans.get(timeout=WAIT_S).rows == ()
        follower.close()
        leader.close()


def test_rank_of_another_load_is_not_accepted(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_link, "ACCEPT_S", 0.5)
    monkeypatch.setattr(step_link, "CONNECT_S", 0.5)
    leader = LeaderLink(rank(0, port), lambda: None)
    follower = FollowerLink(rank(1, port, "another secret".ljust(32)), lambda plan: None, lambda: None)
    with pytest.raises(ConnectionError):
        follower.open()
    with pytest.raises(GroupBroken, match="does not take the next step"):
        leader.announce(StepPlan((), 0, (), ()))
    follower.close()
    leader.close()


def test_leader_without_the_locks_of_its_devices_does_not_keep_listening(port: int, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LeaderLink(replace(rank(0, port), device_locks=(str(tmp_path / "absent"),)), lambda: None)
    for thread in threading.enumerate():
        if thread.name == "arrivals":
            thread.join(WAIT_S)
            assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
