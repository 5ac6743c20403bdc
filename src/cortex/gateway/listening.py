"""The addresses and the certificate of the gateway's servers, and the sockets that systemd passes to it."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TypeVar

from cortex.gateway.config import Config, GatewaySection
from cortex.http.server import listener
from cortex.http.server.server import Server
from cortex.http.tls import ServerCertificate
from cortex.settings import Listen

T = TypeVar("T")


class CannotListen(Exception):
    """The address is taken or does not belong to this host. The message says which and what to do."""


def certificate_of(config: Config, directory: Path) -> ServerCertificate | None:
    """The configured certificate; None without one. Raises SettingsError."""
    cert, key = config.gateway.tls_cert, config.gateway.tls_key
    if cert is None or key is None:
        return None
    return ServerCertificate(directory / cert.expanduser(), directory / key.expanduser())


_FIRST_PASSED = 3
"""The first descriptor that systemd passes to a service."""


_EVERY_INTERFACE = ("0.0.0.0", "::")


class ListeningSockets:
    """The sockets of one process: those that it was passed (systemd's socket activation), else new ones.

    Sockets that are passed stay open while a service restarts: clients wait for the successor. New ones are bound with
    SO_REUSEPORT, so that a successor that takes over can listen before this process ends.
    """

    def __init__(self, environ: MutableMapping[str, str] | None = None, *, takes_over: bool = False) -> None:
        """Takes the sockets that `LISTEN_FDS` in `environ` names, and removes the variable. `takes_over`: share
        addresses with another gateway of this user."""
        self._passed = passed_sockets({} if environ is None else environ)
        self._takes_over = takes_over

    async def check(self, section: GatewaySection) -> None:
        """Raises CannotListen for an address where `listen` would fail now."""
        for name in ("listen", "ollama_listen", "metrics_listen"):
            listen: Listen | None = getattr(section, name)
            if listen is not None and not any(_is_for(listen, each) for each in self._passed):
                await asyncio.to_thread(_attempt, self._probe, listen, f"gateway.{name}")

    async def listen(self, server: Server, listen: Listen, key: str, tls: ssl.SSLContext | None) -> tuple[str, int]:
        """Listen on a configured address, the value of `key`; returns the bound one. Raises CannotListen."""
        passed = [each for each in self._passed if _is_for(listen, each)]
        if passed:
            self._passed = [each for each in self._passed if each not in passed]
            return server.listen_on(passed, tls=tls, is_shared=True)
        return server.listen_on(await asyncio.to_thread(_attempt, self._listen, listen, key), tls=tls)

    def check_all_used(self) -> None:
        """Raises CannotListen for a passed socket that matches no configured address."""
        if self._passed:
            address = "{}:{}".format(*self._passed[0].getsockname()[:2])
            raise CannotListen(
                f"systemd passed a socket for {address}, where the configuration does not listen;"
                " change the address in cortex.socket, or gateway.listen"
            )

    def _probe(self, listen: Listen) -> None:
        """Raises OSError if something else listens there, unless it is taken over."""
        for probe in listener.bind(listen.host, listen.port, shares_port=self._takes_over):
            probe.close()

    def _listen(self, listen: Listen) -> list[socket.socket]:
        self._probe(listen)
        return listener.listen(listen.host, listen.port, shares_port=True)


def _attempt(act: Callable[[Listen], T], listen: Listen, key: str) -> T:
    """`act`, or CannotListen with what to do."""
    try:
        return act(listen)
    except OSError as problem:
        number = problem.errno or 0
        reason = os.strerror(number) if number > 0 else problem.strerror or problem  # negative: of a failed lookup
        raise CannotListen(f"cannot listen on {listen}: {reason}; stop what uses it, or set {key}") from problem


def _is_for(listen: Listen, passed: socket.socket) -> bool:
    """A socket for every interface does not match an address of one: it would admit clients that the operator
    excludes."""
    host, port = passed.getsockname()[:2]
    return port == listen.port and listen.host in (host, *_EVERY_INTERFACE)


def passed_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The listening sockets that the service manager passed to this process, by `sd_listen_fds(3)`."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    sockets = []
    for number in range(_FIRST_PASSED, _FIRST_PASSED + int(count)):
        os.set_inheritable(number, False)
        listening = socket.socket(fileno=number)
        listening.setblocking(False)
        sockets.append(listening)
    return sockets
