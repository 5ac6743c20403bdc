"""The worker process: `python -m cortex.neuron.device.worker`, started by the daemon, one per device.

Three threads: the reader turns frames into jobs, the engine thread (`cuda-dev-N` or `cpu`) does them, the
writer sends what they give and a heartbeat. The process ends when it is told to, when its device faults,
and when the daemon is gone, however it went: the channel's end and a death signal both say so.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time

from cortex.neuron.device.address import DeviceAddress
from cortex.neuron.device.channel import BlockingChannel, ChannelError
from cortex.neuron.device.executor import DeviceFault, Executor
from cortex.neuron.device.faults import explain
from cortex.neuron.device.outbox import Outbox
from cortex.neuron.device.protocol import CancelLoad, Event, Faulted, Hello

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
EXIT_FAULTED = 70
"""EX_SOFTWARE: the device faulted or the engine cannot be imported."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.neuron.device.worker", description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="file descriptor of the socket to the daemon")
    parser.add_argument("--kind", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--engine", required=True, help="module:attribute of the engine's load function")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    device = DeviceAddress(arguments.kind, arguments.index)
    logging.basicConfig(
        level=arguments.log_level,
        format=f"%(asctime)s %(levelname)s [{device.thread_name}] %(name)s: %(message)s",
        stream=sys.stderr,
    )
    faulthandler.enable()
    _die_with_parent()
    # A terminal or a service manager signals the whole group: the daemon decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os._exit(_serve(BlockingChannel(socket.socket(fileno=arguments.channel)), device, arguments.engine))


def _serve(channel: BlockingChannel, device: DeviceAddress, engine: str) -> int:
    """Runs the three threads; returns the exit code. The caller leaves with `os._exit`: a wedged device
    must not hold up the end, and there is nothing in this process that outlives it."""
    outbox = Outbox()
    outbox.put(Hello(os.getpid()))
    executor = Executor(device, engine, outbox)
    farewell: list[Event] = []
    ended = threading.Event()

    def read() -> None:
        try:
            for commands in channel.receive():
                for command in commands:
                    if isinstance(command, CancelLoad):
                        executor.cancel_load(command.handle)
                executor.inbox.put(commands)
        except (OSError, ChannelError) as error:
            log.error("the channel to the daemon failed: %s", error)
        os._exit(0)

    def execute() -> None:
        _name_thread(device.thread_name)
        try:
            executor.run()
        except DeviceFault as fault:
            farewell.append(Faulted(str(fault)))
        except Exception as error:
            log.exception("the engine thread ended")
            farewell.append(Faulted(f"the engine thread ended: {explain(error)}"))
        ended.set()

    threading.Thread(target=read, name="reader", daemon=True).start()
    threading.Thread(target=execute, name=device.thread_name, daemon=True).start()
    # The main thread is the writer.
    try:
        reported_at_s = 0.0
        while not ended.is_set():
            events = outbox.take(HEARTBEAT_S)
            if time.monotonic() - reported_at_s >= HEARTBEAT_S:
                reported_at_s = time.monotonic()
                events.append(executor.report())
            if events:
                channel.send(events)
        channel.send([*outbox.take(0), *farewell])
    except OSError:
        pass  # the daemon is gone; so are we
    return EXIT_FAULTED if farewell else 0


def _die_with_parent() -> None:
    """Asks the kernel to kill this process when the daemon dies; the channel's end is the portable second way."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _name_thread(name: str) -> None:
    """Lets `top -H` and debuggers show the calling thread under the name Python knows it by."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, argument)


if __name__ == "__main__":
    main()
