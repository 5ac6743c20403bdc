"""The addresses and the certificate of the gateway's servers."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from cortex.gateway.config import Config
from cortex.http.server.server import Server
from cortex.settings import Listen
from cortex.tls import ServerCertificate


class CannotListen(Exception):
    """The address is taken or does not belong to this host. The message says which and what to do."""


def certificate_of(config: Config, directory: Path) -> ServerCertificate | None:
    """The configured certificate; None without one. Raises SettingsError."""
    cert, key = config.gateway.tls_cert, config.gateway.tls_key
    if cert is None or key is None:
        return None
    return ServerCertificate(directory / cert.expanduser(), directory / key.expanduser())


async def listen_on(server: Server, listen: Listen, key: str, tls: ssl.SSLContext | None) -> tuple[str, int]:
    """Listen on a configured address, the value of `key`; returns the bound one. Raises CannotListen."""
    try:
        return await server.listen(listen.host, listen.port, tls=tls)
    except OSError as problem:
        number = problem.errno or 0
        reason = os.strerror(number) if number > 0 else problem.strerror or problem  # negative: of a failed lookup
        raise CannotListen(f"cannot listen on {listen}: {reason}; stop what uses it, or set {key}") from problem
