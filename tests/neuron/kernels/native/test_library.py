"""Compiled functions in the cache are used only if nobody else can have written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cortex.neuron.kernels.native.library import is_private


@pytest.mark.parametrize(("mode", "expected"), [(0o755, True), (0o600, True), (0o775, False), (0o757, False)])
def test_only_files_that_others_cannot_write_are_used(tmp_path: Path, mode: int, expected: bool) -> None:
    path = tmp_path / "native.so"
    path.touch()
    path.chmod(mode)
    assert is_private(path) is expected
    link = tmp_path / "link.so"
    link.symlink_to(path)
    assert not is_private(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "native.so"
    path.touch()
    os.chown(path, 65534, 65534)
    assert not is_private(path)
