"""Keeps the ranks of a divided model in step: the leader's worker sends each plan directly to the other ranks' workers,
over Unix sockets in the load's private directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from cortex.ipc.channel import BlockingChannel, ChannelError, encode_frame
from cortex.neuron.engine.errors import GroupBroken
from cortex.neuron.engine.parallel.private_sockets import accepted, connected, listening
from cortex.neuron.engine.request import RankSpec
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.worker.protocol import AnnouncedStep

log = logging.getLogger(__name__)

RETRY_S = 0.0005
_SOCKET = "steps"
ACCEPT_S = 60.0
"""Time limit for connections. Ranks connect as soon as they are loaded, before the first plan is sent."""


class LeaderLink:
    """The leader's end (an engine's `StepLink`). Belongs to the engine thread."""

    def __init__(self, rank: RankSpec, follow_others: Callable[[], None], *, accept_s: float = ACCEPT_S) -> None:
        """Listens from now on. `follow_others`: runs the steps that other leaders have announced to this worker.
        `accept_s`: how long the first plan waits for the other ranks.

        Raises OSError.
        """
        self.follow_others = follow_others
        self._accept_s = accept_s
        self._followers: list[socket.socket] = []
        self._arrivals = _Arrivals(rank)  # first: where the port is taken, nothing is open yet
        self._locks: list[int] = []
        try:
            for path in rank.device_locks:
                self._locks.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Locks the devices in a fixed order. The kernel releases the locks of a process that dies.

        The leader that holds a lock may wait for this worker to follow its step, so this one must not simply block.
        """
        with contextlib.ExitStack() as locked:
            for lock in self._locks:
                while not _try_lock(lock):
                    self.follow_others()
                    time.sleep(RETRY_S)
                locked.callback(fcntl.flock, lock, fcntl.LOCK_UN)
            yield

    def announce(self, plan: StepPlan) -> None:
        frame = encode_frame([AnnouncedStep(plan)])
        try:
            if not self._followers:
                self._followers = self._arrivals.followers(self._accept_s)
            for follower in self._followers:
                follower.sendall(frame)
        except OSError as error:
            raise GroupBroken(f"a rank of the model does not take the next step: {error}") from error

    def close(self) -> None:
        self._arrivals.close()
        for lock in self._locks:
            os.close(lock)


class _Arrivals:
    """Accepts the other ranks on a thread, so that they need not wait for the leader's first plan."""

    def __init__(self, rank: RankSpec) -> None:
        """Raises OSError."""
        self._is_closed = False
        listener = listening(rank.directory, _SOCKET, rank.size)
        self._ranks: Future[list[socket.socket]] = Future()
        threading.Thread(target=self._accept, args=(listener, rank.size - 1), name="arrivals", daemon=True).start()

    def followers(self, timeout_s: float) -> list[socket.socket]:
        """Raises OSError."""
        try:
            return self._ranks.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"not all ranks have connected within {timeout_s:.0f} s") from None

    def close(self) -> None:
        """Ends the wait for ranks and the connections of those that arrived."""
        self._is_closed = True
        self._ranks.add_done_callback(_close)

    def _accept(self, listener: socket.socket, count: int) -> None:
        connections: list[socket.socket] = []
        try:
            with listener:
                while len(connections) < count:
                    connections.append(accepted(listener, math.inf, self._poll))
            self._ranks.set_result(connections)
        except OSError as error:
            for connection in connections:
                connection.close()
            self._ranks.set_exception(error)

    def _poll(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError("the leader has closed its link")


class FollowerLink:
    """The end of another rank (an engine's `RankLink`): from `open` on, a thread that receives plans."""

    def __init__(self, rank: RankSpec, on_plan: Callable[[StepPlan], None], follow_others: Callable[[], None]) -> None:
        """`on_plan` is called on the thread. `follow_others`: as of `LeaderLink`."""
        self.follow_others = follow_others
        self._rank = rank
        self._on_plan = on_plan
        self._connection: socket.socket | None = None

    def open(self) -> None:
        """Raises OSError if the leader is gone."""
        self._connection = connected(self._rank.directory, _SOCKET)
        threading.Thread(target=self._receive, name="steps", daemon=True).start()

    def _receive(self) -> None:
        assert self._connection is not None
        channel: BlockingChannel[AnnouncedStep] = BlockingChannel(self._connection, AnnouncedStep)
        try:
            for steps in channel.receive():
                for step in steps:
                    self._on_plan(step.plan)
        except (OSError, ChannelError) as error:
            log.info("the link to the leader ended: %s", error)  # if the model is lost, the daemon acts

    def close(self) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(OSError):  # the leader has closed it already
            self._connection.shutdown(socket.SHUT_RDWR)  # ends the thread, too
        self._connection.close()


def _close(ranks: Future[list[socket.socket]]) -> None:
    if ranks.exception() is None:
        for connection in ranks.result():
            connection.close()


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
