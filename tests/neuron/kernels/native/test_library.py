"""Compiled functions in the cache are used only if nobody else can have written them."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.neuron.kernels.native import library
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


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """As another process holds the lock. Gives its descriptor."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths that were compiled to, each in vain."""
    paths: list[Path] = []

    def fail(_: str, path: Path) -> None:
        paths.append(path)
        raise OSError("no such instruction")

    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(library, "compiler", lambda: "/bin/cc")
    monkeypatch.setattr(library, "_compile", fail)
    return paths


def test_who_waits_for_a_compilation_that_fails_does_not_repeat_it(
    tmp_path: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path / "kernels") as holder:

        def fail_elsewhere(_: float) -> None:
            with contextlib.suppress(OSError):
                library._compiled("/bin/cc", library._built("/bin/cc"))  # noqa: SLF001 - as the holder of the lock
            fcntl.flock(holder, fcntl.LOCK_UN)

        monkeypatch.setattr("time.sleep", fail_elsewhere)
        assert library.native_library_or_none.__wrapped__() is None
    assert len(compilations) == 1
    assert library.native_library_or_none.__wrapped__() is None
    assert len(compilations) == 2, "a later process tries again"


def test_a_process_that_keeps_the_lock_does_not_stop_others(
    tmp_path: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", itertools.count(0, 3600).__next__)
    with locked(tmp_path / "kernels"):
        assert library.native_library_or_none.__wrapped__() is None
    assert len(compilations) == 1
