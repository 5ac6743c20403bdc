"""The Python files of the project without those of installed packages, which `make clients` puts below the tests."""

from __future__ import annotations

import os
from pathlib import Path

INSTALLED = {".venv", "node_modules"}


def python_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in INSTALLED]
        found += [Path(parent, name) for name in names if name.endswith(".py")]
    return sorted(found)
