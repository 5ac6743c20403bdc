"""The folder for the files of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cortex.cache_folder import cache_folder


def run_directory(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Configuration and logs of the `cortex up` that listens on `port`."""
    return cache_folder(environment) / "run" / str(port)
