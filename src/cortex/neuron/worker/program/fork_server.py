"""The process that device workers are forked from: `python -m cortex.neuron.worker.program.fork_server`.

It imports torch once, which takes seconds, so that a lost worker is replaced in milliseconds and all workers share the
memory of the imported code. It has one thread and never touches a device: a CUDA context does not survive a fork, so
each worker creates its own. Workers end with this process, and this process ends with the daemon.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import selectors
import signal
import socket
from typing import NoReturn

from cortex.ipc.channel import ChannelError, PacketSocket
from cortex.ipc.child import attach_to_parent, die_with_parent
from cortex.neuron.worker.faults import explain
from cortex.neuron.worker.program import worker
from cortex.neuron.worker.program.device_models import resolve_loader
from cortex.neuron.worker.protocol import DeviceAddress, Exited, Forked, ForkServerCommand, ForkWorker, KillWorker, Warm

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.neuron.worker.program.fork_server", description=__doc__)
    parser.add_argument("--engine", required=True, help="module:attribute of the engine's load function")
    options, control = attach_to_parent(parser)
    gc.disable()  # imports leave little garbage, and its collection takes a seventh of the time
    try:
        resolve_loader(options.engine)
    except Exception as error:  # noqa: BLE001 - each worker meets the same error and reports it to the daemon
        log.error("the engine cannot be imported: %s", explain(error))
    # Imported objects live as long as the process. Frozen, no collection visits them, so their pages stay shared.
    gc.freeze()
    gc.enable()
    try:
        ForkServer(control, options.engine).run()
    except (OSError, ChannelError) as error:
        log.error("control socket to the daemon failed: %s", error)
    os._exit(0)  # the kernel kills the remaining workers


class ForkServer:
    """Forks, kills and reaps workers as the daemon commands."""

    def __init__(self, control: socket.socket, engine: str) -> None:
        self._control: PacketSocket[ForkServerCommand] = PacketSocket(control, ForkServerCommand)
        self._engine = engine
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, tuple[int, int]] = {}
        """Worker number → process id, and a pidfd that becomes readable when the process ends."""

    def run(self) -> None:
        """Runs until the daemon closes the control socket. Raises OSError or ChannelError."""
        self._selector.register(self._control.connection, selectors.EVENT_READ, None)
        self._control.send(Warm())
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._execute_command():
                    return

    def _execute_command(self) -> bool:
        """False when the daemon has closed the socket."""
        received = self._control.receive()
        if received is None:
            return False
        match received:
            case ForkWorker() as fork, int(channel):
                self._fork(fork, channel)
            case KillWorker(worker_number), _ if worker_number in self._workers:
                os.kill(self._workers[worker_number][0], signal.SIGKILL)
        return True

    def _fork(self, fork: ForkWorker, channel: int) -> None:
        parent_id = os.getpid()
        try:
            process_id = os.fork()
        except OSError as error:  # no memory or process ids left; existing workers are not affected
            log.error("cannot fork a worker: %s", error)
            os.close(channel)
            self._control.send(Exited(fork.worker_number, worker.EXIT_FAULTED))
            return
        if process_id == 0:
            die_with_parent(parent_id)
            self._become_worker(fork.device, channel)
        os.close(channel)
        pidfd = os.pidfd_open(process_id)
        self._workers[fork.worker_number] = (process_id, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, fork.worker_number)
        self._control.send(Forked(fork.worker_number, process_id))

    def _become_worker(self, device: DeviceAddress, channel: int) -> NoReturn:
        """In the forked process: closes the fork server's descriptors, then runs the worker."""
        self._selector.close()
        self._control.connection.close()
        for _, pidfd in self._workers.values():
            os.close(pidfd)
        os.setsid()
        os.environ.update(device.environment())
        worker.run(channel, device, self._engine)

    def _reap(self, worker_number: int) -> None:
        process_id, pidfd = self._workers.pop(worker_number)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(process_id, 0)
        self._control.send(Exited(worker_number, os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
