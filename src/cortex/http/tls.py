"""Certificates: the one that a server shows, renewed while it runs, and those that a client trusts."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from cortex.settings import SettingsError, Stamp, stamp

log = logging.getLogger(__name__)

CHECK_FILES_S = 2.0


class ServerCertificate:
    """The certificate of a listening program. Belongs to one event loop.

    Connections keep the certificate that they began with. When the files change, later connections get the new one; if
    the new pair cannot be used, they get the old one, and `stale_reason` says why.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises SettingsError when the pair cannot be used."""
        self._certificate = certificate
        self._key = key
        self._stamps = self._read_stamps()
        self._current = self._load()
        self.context = self._load()
        """Stays the same object. It chooses the certificate of each connection when its handshake begins."""
        self.context.sni_callback = self._choose
        self.stale_reason: str | None = None
        """Why the files on disk are not in use; None when they are."""

    async def watch(self) -> None:
        """Use renewed files, for ever."""
        while True:
            await asyncio.sleep(CHECK_FILES_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Use the files if they have changed. Reads two small files."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._current = self._load()
        except SettingsError as problem:
            self.stale_reason = problem.message
            log.error("the changed certificate is not used, the old one stays in force: %s", problem)
        else:
            self.stale_reason = None
            log.info("new connections use the renewed certificate %s", self._certificate)

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:  # noqa: ARG002
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # An empty password: without one, an encrypted key would ask for it at the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as problem:
            raise SettingsError(
                f"tls_cert {self._certificate} and tls_key {self._key} cannot be used"
                f" ({problem.reason or problem}): both must be PEM, without a password, and belong together"
            ) from problem
        except OSError as problem:
            reason = problem.strerror or problem
            raise SettingsError(
                f"cannot read tls_cert {self._certificate} or tls_key {self._key}: {reason}"
            ) from problem
        return context

    def _read_stamps(self) -> tuple[Stamp, Stamp]:
        return stamp(self._certificate), stamp(self._key)


def own_context(certificate: Path) -> ssl.SSLContext:
    """Accepts the certificate of our own gateway, whatever public name it is for. Raises SettingsError."""
    context = client_context(certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def client_context(ca_file: Path | None) -> ssl.SSLContext:
    """Verifies certificate and host name of a server: against `ca_file` alone if given, else against the system's
    authorities. Raises SettingsError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as problem:
        reason = problem.reason or problem
        raise SettingsError(f"ca_file {ca_file} has no certificate in PEM ({reason}): name another file") from problem
    except OSError as problem:
        raise SettingsError(f"cannot read ca_file {ca_file}: {problem.strerror or problem}") from problem
