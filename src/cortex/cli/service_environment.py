"""The environment file of a service, which commands read as systemd does."""

from __future__ import annotations

import os
import shlex
from collections.abc import MutableMapping
from pathlib import Path


def environment_file(config: Path) -> Path:
    """The file that the unit of a service names, next to its configuration: `cortex.env` for `cortex.toml`."""
    return config.with_suffix(".env")


def use_environment_file(config: Path | None, environ: MutableMapping[str, str] = os.environ) -> Path | None:
    """Add the variables in the environment file of `config` that are not set; returns the file, None without one.
    Raises PermissionError."""
    if config is None or not (file := environment_file(config)).is_file():
        return None
    for name, value in parse(file.read_text(errors="replace")).items():
        environ.setdefault(name, value)
    return file


def parse(text: str) -> dict[str, str]:
    """The assignments in `text`, as systemd reads them; other lines are ignored."""
    found = {}
    for line in text.replace("\\\n", "").splitlines():
        name, separator, value = line.strip().partition("=")
        if not separator or name.startswith(("#", ";")):
            continue
        value = value.strip()
        if value[:1] in ("'", '"'):
            try:
                value = "".join(shlex.split(value))
            except ValueError:  # a quote that does not end
                continue
        found[name.strip()] = value
    return found
