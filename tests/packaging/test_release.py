"""A release is the same bytes whenever and wherever it is built."""

from __future__ import annotations

import importlib.util
import io
import tarfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "packaging" / "release.py"


def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sdist(names: list[str], mtime: int, user: str) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.uid, member.size = mtime, user, mtime, len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    return raw.getvalue()


def test_sdists_of_two_builds_have_equal_bytes() -> None:
    repacked = release().repacked
    first = repacked(sdist(["a/x", "a/y"], 1, "anna"), epoch=1000)
    assert first == repacked(sdist(["a/y", "a/x"], 2, "root"), epoch=1000)
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        files = {each.name: archive.extractfile(each) for each in archive}
        assert {name: file.read() for name, file in files.items() if file is not None} == {"a/x": b"a/x", "a/y": b"a/y"}


def test_version_without_a_changelog_section_is_not_released() -> None:
    module = release()
    module.git = lambda *arguments: ""
    assert "src/cortex/__init__.py has version" in module.obstacle("99.0.0")
