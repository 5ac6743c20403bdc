"""The store of ranks on several hosts: only ranks of the load get in, and the libraries of torch can use it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

from cortex.neuron.engine.errors import LoadCancelled, LoadError
from cortex.neuron.engine.parallel import arrivals, store
from cortex.neuron.engine.parallel.entries import (
    MAX_ENTRIES,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    Entries,
    LocalEntries,
    RemoteEntries,
    ServedEntries,
    StoreError,
)
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.parallel.ports import listening
from cortex.neuron.engine.parallel.store import EntryStore, RankStore
from cortex.neuron.engine.request import RankSpec, RendezvousAddress
from cortex.neuron.engine.scheduling.step_plan import BlockOrder, RowInputs, RowOutputs, RowPlan, StepPlan

from ....ports import free_port
from ....waiting import WAIT_S

library: Any = torch.distributed
HOST, KEY = "127.0.0.1", b"key of rank 1"


@pytest.fixture
def ranks() -> list[RankSpec]:
    """Two ranks on two hosts."""
    address = RendezvousAddress(HOST, free_port(), 0, "s" * 32, HOST)
    return [RankSpec(rank, 2, "", rendezvous=address) for rank in range(2)]


@pytest.fixture
def served() -> Iterator[tuple[ServedEntries, tuple[str, int]]]:
    listener = listening(HOST, 0)
    address = listener.getsockname()
    entries = ServedEntries(listener, [KEY])
    yield entries, address
    entries.close()


def joined(address: tuple[str, int], key: bytes = KEY) -> RemoteEntries:
    return RemoteEntries(arrivals.connected(address, key, time.monotonic() + WAIT_S))


def test_ranks_on_two_hosts_meet_and_sum(ranks: list[RankSpec]) -> None:
    all_met = threading.Barrier(2)

    def join(spec: RankSpec) -> list[float]:
        group = TorchGroup.join(spec, torch.device("cpu"), lambda: None)
        total: list[float] = group.all_reduce(torch.ones(2)).tolist()
        group.wait_for_all("summed")
        if spec.rank == 0:  # nobody else can connect any more
            assert spec.rendezvous is not None
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, spec.rendezvous.store_port))
        all_met.wait(WAIT_S)
        group.close()
        return total

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(join, ranks)) == [[2.0, 2.0]] * 2


def test_leader_that_ends_its_load_ends_the_wait_of_the_others(ranks: list[RankSpec]) -> None:
    def end() -> None:
        raise LoadCancelled("cancelled")

    with ThreadPoolExecutor(1) as threads:
        leader = RankStore.open(ranks[0], lambda: None)
        follower = threads.submit(TorchGroup.join, ranks[1], torch.device("cpu"), lambda: None)
        while not leader.check(["arrived/1"]):
            time.sleep(0.01)
        leader.close()
        with pytest.raises(LoadCancelled, match="another rank of the model ended its load"):
            follower.result(WAIT_S)
        with pytest.raises(LoadCancelled):
            TorchGroup.join(ranks[1], torch.device("cpu"), end)


def test_rank_of_another_load_gets_an_error(ranks: list[RankSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CONNECT_S", 0.2)
    leader = RankStore.open(ranks[0], lambda: None)
    assert ranks[1].rendezvous is not None
    other = replace(ranks[1], rendezvous=replace(ranks[1].rendezvous, secret="t" * 32))
    with pytest.raises(LoadError, match="does not accept rank 1"):
        RankStore.open(other, lambda: None)
    leader.close()


def test_listener_without_the_secret_is_not_trusted() -> None:
    """Such as a program that got the port after the leader died."""
    with socket.create_server((HOST, 0)) as impostor:

        def accept() -> None:
            peer, _ = impostor.accept()
            peer.sendall(bytes(32))
            while len(peer.recv(64, socket.MSG_WAITALL)) < 64:
                pass
            peer.sendall(bytes(32))

        threading.Thread(target=accept, daemon=True).start()
        with (
            socket.create_connection(impostor.getsockname()) as connection,
            pytest.raises(arrivals.NotAuthenticated, match="does not have the secret"),
        ):
            arrivals.introduce(connection, KEY, time.monotonic() + WAIT_S, lambda: None)


def test_leader_of_another_version_is_an_error_and_not_waited_for(
    ranks: list[RankSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens, and waits for the rank to speak first."""
    monkeypatch.setattr(store, "_CONNECT_S", 0.2)
    assert ranks[1].rendezvous is not None
    with (
        socket.create_server((HOST, ranks[1].rendezvous.store_port)),
        pytest.raises(LoadError, match="are both nodes of the same version"),
    ):
        RankStore.open(ranks[1], lambda: None)


def test_peers_without_the_secret_read_and_store_nothing(
    served: tuple[ServedEntries, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MAX_UNAUTHENTICATED", 4)
    entries, address = served
    entries.set("secret key", b"secret value")
    silent = [socket.create_connection(address) for _ in range(8)]
    for peer in silent[:4]:  # the oldest are closed for newer ones
        while peer.recv(1 << 16):
            pass
    for guess in (bytes(64), bytes(1 << 20), b"GET / HTTP/1.1\r\n\r\n".ljust(64)):
        with socket.create_connection(address) as peer:
            received = b""
            try:
                peer.sendall(guess)
                while data := peer.recv(1 << 16):
                    received += data
            except ConnectionError:
                pass
            assert len(received) <= 32  # the nonce
    with pytest.raises(RuntimeError):
        library.TCPStore(*address, 2, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
    assert entries.num_keys() == 1
    rank = joined(address)
    assert rank.get("secret key") == b"secret value"
    rank.close()
    for peer in silent:
        peer.close()


def test_secret_does_not_travel(served: tuple[ServedEntries, tuple[str, int]]) -> None:
    """A recorded handshake is of no use for a second one."""
    _, address = served
    recorded: list[bytes] = []
    with socket.create_server((HOST, 0)) as tap:

        def relay() -> None:
            rank, _ = tap.accept()
            leader = socket.create_connection(address)
            for source, target, count in ((leader, rank, 32), (rank, leader, 64), (leader, rank, 32)):
                recorded.append(source.recv(count, socket.MSG_WAITALL))
                target.sendall(recorded[-1])

        threading.Thread(target=relay, daemon=True).start()
        joined(tap.getsockname()).close()
    assert KEY not in b"".join(recorded)
    listener = listening(HOST, 0)
    again = listener.getsockname()
    entries = ServedEntries(listener, [KEY])
    with socket.create_connection(again) as replayed:
        replayed.sendall(recorded[1])
        replayed.recv(32, socket.MSG_WAITALL)
        assert replayed.recv(1) == b""
    entries.close()


CALLS: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda s: s.check(["a"]), False),
    (lambda s: s.set("a", b"\x00\xff\n"), None),
    (lambda s: s.get("a"), b"\x00\xff\n"),
    (lambda s: s.check(["a"]), True),
    (lambda s: s.check(["a", "b"]), False),
    (lambda s: s.add("n", 3), 3),
    (lambda s: s.add("n", -1), 2),
    (lambda s: s.get("n"), b"2"),
    (lambda s: s.compare_set("a", b"x", b"y"), b"\x00\xff\n"),
    (lambda s: s.compare_set("c", b"", b"y"), b"y"),
    (lambda s: s.compare_set("c", b"y", b"z"), b"z"),
    (lambda s: s.num_keys(), 3),
]


def test_entries_are_those_of_a_store_of_torch(served: tuple[ServedEntries, tuple[str, int]]) -> None:
    remote = joined(served[1])
    for entries in (library.HashStore(), LocalEntries(), remote, EntryStore(LocalEntries())):
        for number, (call, expected) in enumerate(CALLS):
            assert call(entries) == expected, (type(entries), number)
    for own in (LocalEntries(), remote):
        assert own.get("absent") is None
        assert own.delete("absent") is False
        own.set("d", b"")
        assert own.delete("d") is True
    remote.close()


def test_library_calls_every_method_of_the_store() -> None:
    own = EntryStore(LocalEntries())
    called = library.PrefixStore("prefix", own).clone()
    called.set("a", b"1")
    assert own.get("prefix/a") == b"1"
    assert called.num_keys() == 1
    assert called.delete_key("a")
    assert own.num_keys() == 0


@pytest.mark.parametrize("call", [b'["set", {"bytes": 1}]', b"[" * 100_000, b"5", b"{}", b'["no such call"]'])
def test_call_that_is_malformed_gets_an_error_and_the_next_is_served(
    served: tuple[ServedEntries, tuple[str, int]], call: bytes
) -> None:
    connection = arrivals.connected(served[1], KEY, time.monotonic() + WAIT_S)
    connection.sendall(len(call).to_bytes(4, "little") + call)
    length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
    value, error = json.loads(connection.recv(length, socket.MSG_WAITALL))
    assert value is None
    assert error is not None
    rank = RemoteEntries(connection)
    assert rank.add("n", 1) == 1
    rank.close()


@pytest.mark.parametrize("is_remote", [False, True])
def test_entries_are_bounded(served: tuple[ServedEntries, tuple[str, int]], *, is_remote: bool) -> None:
    entries: Entries = joined(served[1]) if is_remote else served[0]
    for key, value in (("k" * (MAX_KEY_BYTES + 1), b""), ("k", bytes(MAX_VALUE_BYTES + 1))):
        with pytest.raises(StoreError, match="bytes of key"):
            entries.set(key, value)
    entries.set("k" * MAX_KEY_BYTES, bytes(range(256)) * (MAX_VALUE_BYTES // 256))
    assert entries.get("k" * MAX_KEY_BYTES) == bytes(range(256)) * (MAX_VALUE_BYTES // 256)
    for number in range(MAX_ENTRIES - 1):
        served[0].set(str(number), b"")
    with pytest.raises(StoreError, match="4096 entries"):
        entries.set("one more", b"")
    entries.set("0", b"overwritten")
    with pytest.raises(StoreError, match="no number"):
        entries.add("0", 1)


def test_library_of_torch_meets_through_the_store(ranks: list[RankSpec]) -> None:
    """NCCL uses a store as this library does; it needs GPUs."""
    all_met = threading.Barrier(2)

    def join(spec: RankSpec) -> float:
        own = RankStore.open(spec, lambda: None)
        group = library.ProcessGroupGloo(
            library.PrefixStore("group", own.library), spec.rank, spec.size, timedelta(seconds=30)
        )
        values = torch.ones(1)
        group.allreduce([values]).wait()
        all_met.wait(WAIT_S)
        del group
        own.close()
        return values.item()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(join, ranks)) == [2.0, 2.0]


def test_store_whose_leader_is_gone_never_raises_in_threads_of_a_library(ranks: list[RankSpec]) -> None:
    leader = RankStore.open(ranks[0], lambda: None)
    rank = RankStore.open(ranks[1], lambda: None)
    leader.close()
    assert rank.library.check(["key"]) is False
    with pytest.raises(StoreError, match="the leader is gone"):
        rank.check(["key"])
    rank.close()


PLAN_FIELDS = {
    StepPlan: "rows num_singles new_rows new_pages page_copies restores saves num_proposals captures order",
    RowPlan: "row start inputs outputs writes decodes cut",
    RowInputs: "count tokens following pictures rope_lag",
    RowOutputs: "draws scores",
    BlockOrder: "action blocks",
}
"""What STEP_PROTOCOL 4 stands for."""


def test_ranks_with_other_plans_do_not_trust_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank would leave out fields that it does not know. Whoever changes them raises STEP_PROTOCOL."""
    found = {kind: " ".join(each.name for each in fields(kind)) for kind in PLAN_FIELDS}
    assert (found, arrivals.STEP_PROTOCOL) == (PLAN_FIELDS, 4)
    proof = arrivals._proof(b"key", b"rank", b"nonces")  # noqa: SLF001 - what goes over the connection
    monkeypatch.setattr(arrivals, "STEP_PROTOCOL", 5)
    assert arrivals._proof(b"key", b"rank", b"nonces") != proof  # noqa: SLF001
