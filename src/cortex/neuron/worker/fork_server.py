"""The process that workers are forked from: `python -m cortex.neuron.worker.fork_server`, started by the daemon.

Importing torch takes seconds and is the same for every worker, so it is done here, once; a worker that died is
replaced in milliseconds, and all workers share the memory of the imported code. This process has one thread and never
touches a device: a CUDA context does not survive a fork, so each worker makes its own. Workers end with it, and it
ends with the daemon.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import selectors
import signal
import socket
from typing import NoReturn

import msgspec

from cortex.ipc.process_control import die_with_parent
from cortex.neuron.worker import worker
from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.faults import explain
from cortex.neuron.worker.harness import resolve_loader
from cortex.neuron.worker.protocol import PACKET_BYTES, Ended, Fork, Forked, Kill, Notice, Order, Warm
from cortex.telemetry import logs

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.neuron.worker.fork_server", description=__doc__)
    parser.add_argument("--control", type=int, required=True, help="file descriptor of the socket to the daemon")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    parser.add_argument("--engine", required=True, help="module:attribute of the engine's load function")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    logs.configure(arguments.log_format, arguments.log_level)
    faulthandler.enable()
    die_with_parent(arguments.parent)
    # A terminal or a service manager signals the whole group: the daemon decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        resolve_loader(arguments.engine)
    except Exception as error:  # noqa: BLE001 - whatever an import raises, each worker meets it again and tells its caller
        log.error("the engine cannot be imported: %s", explain(error))
    # What the imports made lives as long as the process: collections need not look at it, and pages that no
    # collection writes to stay shared.
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=arguments.control)
    try:
        ForkServer(control, arguments.engine).run()
    except OSError as error:
        log.error("the channel to the daemon failed: %s", error)
    os._exit(0)  # the kernel ends the workers that are left


class ForkServer:
    """Forks, ends and reaps workers as the daemon orders."""

    def __init__(self, control: socket.socket, engine: str) -> None:
        self._control = control
        self._engine = engine
        self._orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, tuple[int, int]] = {}
        """Birth → process id, and a descriptor that becomes readable when the process ends."""

    def run(self) -> None:
        """Until the daemon closes its end or dies."""
        self._selector.register(self._control, selectors.EVENT_READ, None)
        self._tell(Warm())
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        """Carries out one order; False when there will be none any more."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        if not packet:
            return False
        match self._orders.decode(packet):
            case Fork() as fork:
                self._fork(fork, descriptors[0])
            case Kill(worker_number):
                if worker_number in self._workers:
                    os.kill(self._workers[worker_number][0], signal.SIGKILL)
        return True

    def _fork(self, fork: Fork, channel: int) -> None:
        parent_id = os.getpid()
        try:
            process_id = os.fork()
        except OSError as error:  # no memory or no process ids left: the workers that there are go on
            log.error("no worker can be forked: %s", error)
            os.close(channel)
            self._tell(Ended(fork.worker_number, worker.EXIT_FAULTED))
            return
        if process_id == 0:
            die_with_parent(parent_id)
            self._become_worker(DeviceAddress(fork.kind, fork.index, fork.uuid), channel)
        os.close(channel)
        ending = os.pidfd_open(process_id)
        self._workers[fork.worker_number] = (process_id, ending)
        self._selector.register(ending, selectors.EVENT_READ, fork.worker_number)
        self._tell(Forked(fork.worker_number, process_id))

    def _become_worker(self, device: DeviceAddress, channel: int) -> NoReturn:
        """In the new process: lets go of what belongs to the old one."""
        self._selector.close()
        self._control.close()
        for _, ending in self._workers.values():
            os.close(ending)
        os.setsid()
        os.environ.update(device.environment())
        worker.run(channel, device, self._engine)

    def _reap(self, worker_number: int) -> None:
        process_id, ending = self._workers.pop(worker_number)
        self._selector.unregister(ending)
        os.close(ending)
        _, status = os.waitpid(process_id, 0)
        self._tell(Ended(worker_number, os.waitstatus_to_exitcode(status)))

    def _tell(self, notice: Notice) -> None:
        self._control.sendall(msgspec.msgpack.encode(notice))


if __name__ == "__main__":
    main()
