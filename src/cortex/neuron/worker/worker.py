"""The worker process, one per device, forked from `fork_server`.

Three threads: the reader turns frames into jobs, the engine thread (`cuda-dev-N` or `cpu`) does them, the
writer sends what they give and a heartbeat. The process ends when it is told to, when its device faults,
and when the daemon is gone, however it went: the channel's end and a death signal both say so.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import NoReturn

from cortex.ipc.channel import BlockingChannel, ChannelError
from cortex.ipc.process_control import name_thread
from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.executor import DeviceFault, Executor
from cortex.neuron.worker.faults import explain
from cortex.neuron.worker.outbox import Outbox
from cortex.neuron.worker.protocol import CancelLoad, Command, Event, Faulted, Hello
from cortex.telemetry import logs

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
EXIT_FAULTED = 70
"""EX_SOFTWARE: the device faulted or the engine cannot be imported."""


def run(channel: int, device: DeviceAddress, engine: str) -> NoReturn:
    """The life of a worker, in a process that was just forked. `channel` is its socket's file descriptor.

    Leaves with `os._exit`: a wedged device must not hold up the end, and there is nothing in this process that
    outlives it.
    """
    name_thread("neuron-worker")
    logs.configure(*logs.in_use(), lambda: {"device": device.thread_name})
    try:
        code = _serve(BlockingChannel(socket.socket(fileno=channel), Command), device, engine)
    except Exception:
        log.exception("the worker ended")
        code = EXIT_FAULTED
    os._exit(code)


def _serve(channel: BlockingChannel[Command], device: DeviceAddress, engine: str) -> int:
    """Runs the three threads; returns the exit code."""
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
        name_thread(device.thread_name)
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
