"""A file with a secret is complete and private, or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cortex.system import private_file


def test_content_is_private_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    private_file.write(path, b"one")
    private_file.write(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        private_file.write(tmp_path / "secret", b"one")
    assert list(tmp_path.iterdir()) == []
