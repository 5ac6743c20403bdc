"""Directories for downloads, and for the files of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """`$CORTEX_CACHE`, else `$XDG_CACHE_HOME/cortex`, else `~/.cache/cortex`. It need not exist yet."""
    if chosen := environment.get("CORTEX_CACHE"):
        return Path(chosen).expanduser().absolute()
    if shared := environment.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "cortex"
    return Path.home() / ".cache" / "cortex"


def run_directory(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Configuration and logs of the `cortex up` that listens on `port`."""
    return cache_directory(environment) / "run" / str(port)
