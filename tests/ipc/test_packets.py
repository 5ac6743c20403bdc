import os
import socket
from collections.abc import Iterator

import pytest

from cortex.ipc.channel import MAX_PACKET_BYTES, ChannelError, PacketSocket
from cortex.ipc.fork_server import Fork, Kill

Pair = tuple[socket.socket, PacketSocket[Fork | Kill]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, PacketSocket(theirs, Fork | Kill)


def num_open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_message_arrives_with_its_descriptor_and_the_next_one_without(pair: Pair) -> None:
    ours, receiver = pair
    sender = PacketSocket[Fork | Kill](ours, Fork | Kill)
    reading, writing = os.pipe()
    sender.send(Fork(1, b"argument"), writing)
    sender.send(Kill(1))
    os.close(writing)
    received = receiver.receive()
    assert received is not None
    message, descriptor = received
    assert message == Fork(1, b"argument")
    assert descriptor is not None
    os.write(descriptor, b"x")
    assert os.read(reading, 1) == b"x"
    assert receiver.receive() == (Kill(1), None)
    os.close(descriptor)
    os.close(reading)


def test_receives_none_when_the_other_side_has_closed(pair: Pair) -> None:
    ours, receiver = pair
    ours.close()
    assert receiver.receive() is None


@pytest.mark.parametrize(
    ("packet", "reason"),
    [(b"\xc1\xc1", "does not decode"), (b"\x00" * (MAX_PACKET_BYTES + 1), "limit")],
    ids=["damaged", "oversized"],
)
def test_invalid_packet_is_an_error_and_leaks_no_descriptor(pair: Pair, packet: bytes, reason: str) -> None:
    ours, receiver = pair
    before = num_open_descriptors()
    socket.send_fds(ours, [packet], [ours.fileno()])
    with pytest.raises(ChannelError, match=reason):
        receiver.receive()
    assert num_open_descriptors() <= before, "sockets of earlier tests may have been closed meanwhile"
