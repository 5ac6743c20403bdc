"""The worker process, one per device, forked from the fork server.

It has three threads: the reader turns frames into commands, the engine thread (`cuda-dev-N` or `cpu`) executes them,
and the writer sends the events and a heartbeat. The process ends when it is asked to, when its device faults, and when
the daemon dies.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from cortex.ipc.channel import BlockingChannel, ChannelError
from cortex.ipc.child import name_thread
from cortex.neuron.worker.faults import DeviceFault, explain
from cortex.neuron.worker.program.device_models import resolve_loader
from cortex.neuron.worker.program.executor import Executor
from cortex.neuron.worker.protocol import CancelLoad, Command, DeviceAddress, Event, Faulted, Hello
from cortex.telemetry import logs

if TYPE_CHECKING:
    from cortex.ipc.fork_server import Serve  # which runs as `__main__`, where this is used

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5


class Outbox:
    """Collects events until the writer thread sends them. Any thread may put, one thread takes."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = threading.Condition()

    def put(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def take(self, timeout_s: float) -> list[Event]:
        """All events so far; waits up to `timeout_s` for the first one, then returns an empty list."""
        with self._changed:
            if not self._events:
                self._changed.wait(timeout_s)
            events, self._events = self._events, []
            return events


def prepare(engine: str) -> Serve:
    """`engine` is the engine's load function as `module:attribute`. The argument of a worker is its `DeviceAddress`."""
    name_thread("neuron-fork")
    try:
        resolve_loader(engine)
    except Exception as error:  # noqa: BLE001 - each worker meets the same error and reports it to the daemon
        log.error("the engine cannot be imported: %s", explain(error))

    def serve(connection: socket.socket, argument: bytes) -> int:
        device = msgspec.msgpack.decode(argument, type=DeviceAddress)
        os.setsid()
        os.environ.update(device.environment())
        name_thread("neuron-worker")
        logs.configure(*logs.in_use(), lambda: {"device": device.thread_name})
        return _serve(BlockingChannel(connection, Command), device, engine)

    return serve


def _serve(channel: BlockingChannel[Command], device: DeviceAddress, engine: str) -> int:
    """Runs the three threads; returns the exit code."""
    outbox = Outbox()
    outbox.put(Hello(os.getpid()))
    executor = Executor(device, engine, outbox.put)
    last_events: list[Event] = []
    ended = threading.Event()

    def read() -> None:
        try:
            for commands in channel.receive():
                for command in commands:
                    if isinstance(command, CancelLoad):
                        executor.cancel_load(command.handle)
                executor.inbox.put([*commands])
        except (OSError, ChannelError) as error:
            log.error("channel to the daemon failed: %s", error)
        os._exit(0)

    def execute() -> None:
        name_thread(device.thread_name)
        try:
            executor.run()
        except DeviceFault as fault:
            last_events.append(Faulted(str(fault)))
        except Exception as error:
            log.exception("engine thread failed")
            last_events.append(Faulted(f"the engine thread failed: {explain(error)}"))
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
        channel.send([*outbox.take(0), *last_events])
    except OSError:
        pass  # the daemon is gone
    return os.EX_SOFTWARE if last_events else 0
