"""One incarnation of a tokenizer process: the process, and the connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from pathlib import Path

from cortex.ipc.channel import BlockingChannel, ChannelError
from cortex.ipc.child import start_child
from cortex.neuron.tokenizer_process.protocol import Reply, Request

_MAX_IDLE_CONNECTIONS = 8
"""So many are kept for the next callers; each is a thread over there."""


class TokenizerProcessLost(Exception):
    """The process ended, or its connection did, before it answered."""


class TokenizerProcess:
    """`start` and `stop` belong to the daemon's loop; `ask` to any other thread, any number of them at once."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._idle: list[_Connection] = []
        self._is_stopped = False
        self._is_lost = False
        self._lock = threading.Lock()

    @classmethod
    async def start(cls, model: Path, fingerprint: str | None) -> TokenizerProcess:
        """A process that begins to read the model's files, which must say what they said when `fingerprint` was taken.
        Raises OSError where none can be made."""
        process, control = await start_child(
            "cortex.neuron.tokenizer_process",
            *("--model", str(model)),
            *(("--fingerprint", fingerprint) if fingerprint is not None else ()),
            # With threads of the library's own, as many as cores, long texts would hold up short ones.
            environment={"TOKENIZERS_PARALLELISM": "false"},
        )
        return cls(process, control)

    @property
    def is_gone(self) -> bool:
        """Of no more use. A connection tells of its death before the loop can."""
        return self._is_stopped or self._is_lost or self._process.returncode is not None

    def ask(self, request: Request) -> Reply:
        """Blocks until the answer is there. Raises TokenizerProcessLost."""
        try:
            connection = self._connection()
            try:
                reply = connection.ask(request)
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
        """Ends the process, whatever it is doing; who waits for an answer gets TokenizerProcessLost. Idempotent."""
        with self._lock:
            self._is_stopped = True
            idle, self._idle = self._idle, []
            self._control.close()
        for connection in idle:
            connection.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)  # it has nothing to tidy up
        await self._process.wait()

    def _connection(self) -> _Connection:
        with self._lock:
            if self._is_stopped:
                raise TokenizerProcessLost("the tokenizer process was ended")
            if self._idle:
                return self._idle.pop()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                except OSError as error:
                    ours.close()
                    raise TokenizerProcessLost(f"the tokenizer process takes no connection: {error}") from error
        return _Connection(ours)


class _Connection:
    """Used by one caller at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._channel: BlockingChannel[Reply] = BlockingChannel(connection, Reply)
        self._replies = self._channel.receive()

    def ask(self, request: Request) -> Reply:
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
