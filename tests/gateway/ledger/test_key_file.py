"""Edits of the configuration file: its mode, its owner and links to it stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cortex.gateway.ledger.key_file import KeyFile
from cortex.gateway.ledger.keys import generate


def test_edit_through_a_link_keeps_the_link_and_the_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "real" / "cortex.toml", tmp_path / "cortex.toml"
    target.parent.mkdir()
    target.write_text("# ours\n", encoding="utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    KeyFile(link).add(generate("anna").section)
    assert link.is_symlink()
    assert "anna" in target.read_text(encoding="utf-8")
    assert target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(target.parent) == ["cortex.toml"]


def test_new_file_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text("", encoding="utf-8")
    path.chmod(0o600)
    modes: list[int] = []
    opened = os.open

    def record(file, flags, mode=0o777, **more):  # type: ignore[no-untyped-def]
        if flags & os.O_CREAT:
            modes.append(mode)
        return opened(file, flags, mode, **more)

    monkeypatch.setattr(os, "open", record)
    KeyFile(path).add(generate("anna").section)
    assert modes == [0o600]
