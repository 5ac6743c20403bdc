"""One tokenizer process as the daemon sees it: the process and the connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from pathlib import Path

from cortex.ipc.channel import BlockingChannel, ChannelError
from cortex.ipc.child import start_child
from cortex.ipc.packets import PacketSocket
from cortex.neuron.tokenizer_process.protocol import Connect, Reply, Request

_MAX_IDLE_CONNECTIONS = 8
"""Connections kept for later calls; each costs a thread in the tokenizer process."""


class TokenizerProcessLost(Exception):
    """The process or the connection ended before the reply."""


class TokenizerProcess:
    """`start` and `stop` run on the daemon's loop; `call` runs on other threads, any number at once."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control: PacketSocket[Connect] = PacketSocket(control, Connect)
        self._idle: list[_Connection] = []
        self._is_stopped = False
        self._is_lost = False
        self._lock = threading.Lock()

    @classmethod
    async def start(cls, model: Path, fingerprint: str | None) -> TokenizerProcess:
        """Starts a process that reads the model's files, which must match `fingerprint` if there is one.
        Raises OSError."""
        process, control = await start_child(
            "cortex.neuron.tokenizer_process",
            *("--model", str(model)),
            *(("--fingerprint", fingerprint) if fingerprint is not None else ()),
            # The library's own thread pool has one thread per core, so long texts would delay short ones.
            environment={"TOKENIZERS_PARALLELISM": "false"},
        )
        return cls(process, control)

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is unusable. A connection may notice that before the loop reaps the process."""
        return self._is_stopped or self._is_lost or self._process.returncode is not None

    def call(self, request: Request) -> Reply:
        """Blocks until the reply. Raises TokenizerProcessLost, or Unsendable."""
        try:
            connection = self._connection()
            try:
                reply = connection.call(request)
            except BaseException:
                connection.close()
                raise
        except TokenizerProcessLost:
            self._is_lost = True
            raise
        with self._lock:
            if len(self._idle) < _MAX_IDLE_CONNECTIONS and not self._is_stopped:
                self._idle.append(connection)
                return reply
        connection.close()
        return reply

    async def stop(self) -> None:
        """Kills the process; running calls raise TokenizerProcessLost. Idempotent."""
        with self._lock:
            self._is_stopped = True
            idle, self._idle = self._idle, []
            self._control.connection.close()
        for connection in idle:
            connection.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # it has no state to save
        await self._process.wait()

    def _connection(self) -> _Connection:
        with self._lock:
            if self._is_stopped:
                raise TokenizerProcessLost("the tokenizer process was stopped")
            if self._idle:
                return self._idle.pop()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._control.send(Connect(), theirs.fileno())
                except OSError as error:
                    ours.close()
                    raise TokenizerProcessLost(f"cannot connect to the tokenizer process: {error}") from error
        return _Connection(ours)


class _Connection:
    """Used by one caller at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._channel: BlockingChannel[Reply] = BlockingChannel(connection, Reply)
        self._replies = self._channel.receive()

    def call(self, request: Request) -> Reply:
        try:
            self._channel.send([request])
            [reply] = next(self._replies)
        except StopIteration:
            raise TokenizerProcessLost("the tokenizer process ended") from None
        except (OSError, ChannelError) as error:
            raise TokenizerProcessLost(f"the connection to the tokenizer process failed: {error}") from error
        return reply

    def close(self) -> None:
        self._socket.close()
