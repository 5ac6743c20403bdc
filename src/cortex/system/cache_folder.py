"""The folder for data that programs can recreate: downloads, compiled functions, measurements."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`$CORTEX_CACHE`, else `$XDG_CACHE_HOME/cortex`, else `~/.cache/cortex`. It need not exist yet."""
    if chosen := environment.get("CORTEX_CACHE"):
        return Path(chosen).expanduser().absolute()
    if shared := environment.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "cortex"
    return Path.home() / ".cache" / "cortex"
