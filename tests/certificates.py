"""Certificates for tests: an authority of our own, made with the `openssl` command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its private key, as PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates. `own.cert` is the file that clients trust."""

    folder: Path
    own: Certificate

    @classmethod
    def create(cls, folder: Path) -> Authority:
        own = Certificate(folder / "ca.pem", folder / "ca-key.pem")
        _openssl(
            *("req", "-x509", "-days", "2", "-subj", "/CN=test authority", *_NEW_KEY),
            *("-keyout", str(own.key), "-out", str(own.cert)),
        )
        return cls(folder, own)

    def issue(self, name: str, *alternative_names: str) -> Certificate:
        """A certificate for `localhost` and 127.0.0.1, unless `alternative_names` say otherwise."""
        names = ",".join(alternative_names or ("DNS:localhost", "IP:127.0.0.1"))
        made = Certificate(self.folder / f"{name}.pem", self.folder / f"{name}-key.pem")
        _openssl(
            *("req", "-x509", "-days", "1", "-subj", f"/CN={name}", *_NEW_KEY),
            *("-CA", str(self.own.cert), "-CAkey", str(self.own.key), "-addext", f"subjectAltName={names}"),
            *("-keyout", str(made.key), "-out", str(made.cert)),
        )
        return made


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
