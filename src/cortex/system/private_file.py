"""Files with secrets: readable only by their owner, and complete or absent, even on a full disk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write `path`, or replace it. `content` may come piece by piece. Raises OSError, or what reading `content` raises,
    and then nothing has changed."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.writelines((content,) if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
