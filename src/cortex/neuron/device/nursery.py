"""The daemon's end of the process that workers are forked from: starts it, orders workers, hears how they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket

import msgspec

from cortex.neuron.device.address import DeviceAddress
from cortex.neuron.device.child import start_child
from cortex.neuron.device.protocol import PACKET_BYTES, Ended, Fork, Forked, Kill, Notice, Order, Warm

log = logging.getLogger(__name__)

ENGINE = "cortex.neuron.device.torch_harness:load"
"""The engine that workers run; tests put a faulty one in its place."""

CLOSE_S = 2.0
"""How long the process may take to leave once nothing is wanted from it."""


class Newborn:
    """A worker that was ordered. `exited` has its return code once it is gone; negative for a signal."""

    def __init__(self, stock: _Stock, birth: int) -> None:
        self.process_id: int | None = None
        """None until it is forked, which waits for the engine's import."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stock = stock
        self._birth = birth

    def kill(self) -> None:
        """Ends it now, born or not; `exited` follows. Idempotent."""
        if not self.exited.done():
            self._stock.kill(self._birth)

    def ended(self, return_code: int) -> None:
        if not self.exited.done():  # else who waited was cancelled, and the future with it
            self.exited.set_result(return_code)


class Nursery:
    """Makes workers for any number of devices. Belongs to one loop."""

    def __init__(self, engine: str = ENGINE) -> None:
        """`engine` names the load function of the workers as `module:attribute`."""
        self._engine = engine
        self._stock: _Stock | None = None
        self._starting = asyncio.Lock()
        self._births = itertools.count(1)

    async def warm(self) -> None:
        """Starts importing the engine in the process that workers come from; returns at once. Raises OSError."""
        await self._ensure_stock()

    async def fork(self, device: DeviceAddress, channel: socket.socket) -> Newborn:
        """Orders a worker that serves the other end of `channel`. Raises OSError where none can be made."""
        stock = await self._ensure_stock()
        return stock.fork(next(self._births), device, channel)

    async def close(self) -> None:
        """Ends the process and whatever was forked from it."""
        if self._stock is not None:
            await self._stock.close()

    async def _ensure_stock(self) -> _Stock:
        async with self._starting:
            if self._stock is None or self._stock.is_gone:
                self._stock = await _Stock.start(self._engine)
            return self._stock


class _Stock:
    """One incarnation of the process, and the workers it has."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        control.setblocking(False)
        self.is_gone = False
        self._process = process
        self._control = control
        self._warm = False
        self._newborns: dict[int, Newborn] = {}
        self._notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)
        asyncio.get_running_loop().add_reader(control.fileno(), self._hear)
        self._watch = asyncio.create_task(self._await_end())

    @classmethod
    async def start(cls, engine: str) -> _Stock:
        process, control = await start_child(
            "cortex.neuron.device.zygote", "--engine", engine, environment=_spinning_little()
        )
        return cls(process, control)

    def fork(self, birth: int, device: DeviceAddress, channel: socket.socket) -> Newborn:
        order = Fork(birth, device.kind, device.index, device.uuid)
        socket.send_fds(self._control, [msgspec.msgpack.encode(order)], [channel.fileno()])
        newborn = self._newborns[birth] = Newborn(self, birth)
        return newborn

    def kill(self, birth: int) -> None:
        if self._warm:
            self._order(Kill(birth))
        else:
            # It takes no orders before the import is over, which may never come; and it has no workers yet.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        if not self._warm:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        elif not self.is_gone:
            self._control.shutdown(socket.SHUT_WR)
        await asyncio.wait({self._watch}, timeout=CLOSE_S)
        if not self.is_gone:
            self._process.kill()
            await asyncio.wait({self._watch})

    def _order(self, order: Order) -> None:
        with contextlib.suppress(ConnectionError):  # it has just died, which `_await_end` tells
            self._control.send(msgspec.msgpack.encode(order))

    def _hear(self) -> None:
        """Takes what it has to say; on the loop, whenever there is something."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := self._control.recv(PACKET_BYTES):
                self._heard(self._notices.decode(packet))
            asyncio.get_running_loop().remove_reader(self._control.fileno())

    def _heard(self, notice: Notice) -> None:
        match notice:
            case Warm():
                self._warm = True
            case Forked(birth, process_id):
                self._newborns[birth].process_id = process_id
            case Ended(birth, return_code):
                self._newborns.pop(birth).ended(return_code)

    async def _await_end(self) -> None:
        return_code = await self._process.wait()
        self.is_gone = True
        self._hear()
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        if self._newborns:
            log.error("the process that workers are forked from ended with %d, and its workers with it", return_code)
        newborns, self._newborns = self._newborns, {}
        for newborn in newborns.values():
            # Where it was never forked it ended as its maker did; else the kernel has killed it.
            newborn.ended(return_code if newborn.process_id is None else -signal.SIGKILL)


def _spinning_little() -> dict[str, str]:
    """Threads of a parallel loop wait for each other by spinning. By default that goes on for milliseconds, and where
    another program wants the same core, a token takes ten times as long. A few microseconds are enough."""
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": "1000"}
