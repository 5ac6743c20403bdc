import os
import socket

import pytest

from cortex.ipc.channel import ChannelError
from cortex.ipc.packets import MAX_PACKET_BYTES, PacketSocket
from cortex.neuron.worker.protocol import DeviceAddress, Fork, ForkServerCommand, Kill


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, PacketSocket[ForkServerCommand](theirs, ForkServerCommand)


def num_open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_message_arrives_with_its_descriptor_and_the_next_one_without(pair):
    ours, receiver = pair
    sender = PacketSocket(ours, ForkServerCommand)
    reading, writing = os.pipe()
    sender.send(Fork(1, DeviceAddress("cuda", 2, "GPU-1")), writing)
    sender.send(Kill(1))
    os.close(writing)
    message, descriptor = receiver.receive()
    assert message == Fork(1, DeviceAddress("cuda", 2, "GPU-1"))
    os.write(descriptor, b"x")
    assert os.read(reading, 1) == b"x"
    assert receiver.receive() == (Kill(1), None)
    os.close(descriptor)
    os.close(reading)


def test_receives_none_when_the_other_side_has_closed(pair):
    ours, receiver = pair
    ours.close()
    assert receiver.receive() is None


@pytest.mark.parametrize(
    ("packet", "reason"),
    [(b"\xc1\xc1", "does not decode"), (b"\x00" * (MAX_PACKET_BYTES + 1), "limit")],
    ids=["damaged", "oversized"],
)
def test_invalid_packet_is_an_error_and_leaks_no_descriptor(pair, packet, reason):
    ours, receiver = pair
    before = num_open_descriptors()
    socket.send_fds(ours, [packet], [ours.fileno()])
    with pytest.raises(ChannelError, match=reason):
        receiver.receive()
    assert num_open_descriptors() == before
