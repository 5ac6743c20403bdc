"""Digests of whole files, each read once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from cortex.neuron.weights.hub.file_digests import FileDigests
from cortex.neuron.weights.hub.local import model_files

CONTENT = bytes(range(256)) * 9000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def nothing(_seconds: float) -> None:
    pass


@pytest.mark.parametrize("is_direct", [False, True])
def test_file_is_read_once_until_it_changes(tmp_path: Path, *, is_direct: bool) -> None:
    (path := tmp_path / "model.safetensors").write_bytes(CONTENT)
    digests, chunks = FileDigests(tmp_path / "kept.json", small_bytes=100), list[float]()
    assert digests.known(path) is None
    assert digests.read(path, chunks.append, is_direct=is_direct) == DIGEST == digests.known(path)
    assert len(chunks) > 1, "a caller may pause"
    assert FileDigests(tmp_path / "kept.json", small_bytes=100).known(path) == DIGEST, "also after a restart"
    before = path.stat()
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert digests.known(path) is None
    path.unlink()
    with pytest.raises(FileNotFoundError):
        digests.known(path)


def test_damaged_file_of_digests_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_bytes(b"{\xff")
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    assert FileDigests(tmp_path / "kept.json", small_bytes=100).read(tmp_path / "m.gguf", nothing) == DIGEST


def test_names_of_blobs_are_digests_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / DIGEST).write_bytes(b"never read")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / DIGEST)
    assert FileDigests(tmp_path / "kept.json", small_bytes=100).known(tmp_path / "model.safetensors") == DIGEST


def test_digest_of_a_model_is_that_of_its_files_under_any_names(tmp_path: Path) -> None:
    digests = FileDigests(tmp_path / "kept.json", small_bytes=100)
    for folder, name in (("a", "x.gguf"), ("b", "y.gguf")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(CONTENT)
    a, b = model_files(tmp_path / "a" / "x.gguf"), model_files(tmp_path / "b" / "y.gguf")
    assert digests.of_files(a) == "", "it would have to be read"
    for file in (*a, *b):
        digests.read(file, nothing)
    assert digests.of_files(a) == digests.of_files(b) != ""
    (tmp_path / "a" / "mmproj-x.gguf").write_bytes(b"small")
    assert digests.of_files(model_files(tmp_path / "a" / "x.gguf")) not in ("", digests.of_files(b))
