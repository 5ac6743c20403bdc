"""Models at paths, as repositories for other nodes."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cortex.neuron.weights.hub.file_digests import FileDigests
from cortex.neuron.weights.hub.local import LocalRepository

from ....waiting import WAIT_S
from .slow_digests import SlowDigests


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


def test_lists_the_files_of_a_model_and_no_others(tmp_path: Path) -> None:
    wanted = ["config.json", "model.safetensors", "tokenizer.json", "merges.txt", "1_Pooling/config.json"]
    write(tmp_path, *wanted, "notes.txt", ".git/config.json", "a/b/c/config.json", "training/state.bin")
    listing = LocalRepository(tmp_path, FileDigests()).listing()
    assert listing is not None
    assert sorted(listing.files) == sorted(wanted)
    for name, file in listing.files.items():
        assert file.digest == hashlib.sha256(name.encode()).hexdigest()
        assert file.num_bytes == len(name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.gguf", {"a.gguf", "mmproj-a.gguf"}),
        ("b-00002-of-00002.gguf", {"b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf"}),
    ],
)
def test_lists_the_parts_and_towers_of_a_gguf_file(tmp_path: Path, path: str, expected: set[str]) -> None:
    write(tmp_path, "a.gguf", "mmproj-a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "c.gguf")
    listing = LocalRepository(tmp_path / path, FileDigests()).listing()
    assert listing is not None
    assert set(listing.files) == expected


def test_files_that_have_changed_are_listed_again_and_not_sent_as_what_they_were(tmp_path: Path) -> None:
    write(tmp_path, "config.json", "model.safetensors")
    repository = LocalRepository(tmp_path, FileDigests())
    before = repository.listing()
    assert before is not None
    digest = before.files["config.json"].digest
    descriptor = repository.open_blob(digest)
    assert os.read(descriptor, 100) == b"config.json"
    os.close(descriptor)
    (tmp_path / "config.json").write_bytes(b"changed")
    with pytest.raises(FileNotFoundError):
        repository.open_blob(digest)
    after = repository.listing()
    assert after is not None
    assert after.commit != before.commit
    assert after.files["config.json"].digest == hashlib.sha256(b"changed").hexdigest()


def test_file_that_disappears_while_it_is_opened_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "config.json")
    repository = LocalRepository(tmp_path, FileDigests())
    listing = repository.listing()
    assert listing is not None
    real = os.fstat

    def gone(descriptor: int) -> os.stat_result:
        (tmp_path / "config.json").unlink(missing_ok=True)
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", gone)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        repository.open_blob(listing.files["config.json"].digest)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("name", ["missing", "missing.gguf", "empty"])
def test_path_without_a_model_has_no_listing(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert LocalRepository(tmp_path / name, FileDigests()).listing() is None
    with pytest.raises(FileNotFoundError):
        LocalRepository(tmp_path / name, FileDigests()).open_blob("0" * 64)


def test_closed_repository_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_bytes(bytes(3 << 20))
    repository, digests = LocalRepository(tmp_path, FileDigests()), SlowDigests(monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        listing = threads.submit(repository.listing)
        assert digests.has_begun.wait(WAIT_S)
        repository.close()
        digests.may_end.set()
        assert listing.result(WAIT_S) is None
    assert digests.num_updates == 1
