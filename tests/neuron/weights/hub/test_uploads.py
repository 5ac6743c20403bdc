"""Files that clients send, and repositories that are made of them."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from cortex.neuron.weights.errors import FilesMissing, Malformed
from cortex.neuron.weights.hub import uploads
from cortex.neuron.weights.hub.cache import RepositoryCache

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def test_repository_of_uploads_is_one_of_the_cache(tmp_path: Path) -> None:
    uploads.store(tmp_path, DIGEST, [CONTENT[:3], CONTENT[3:]])
    assert uploads.find(tmp_path, DIGEST)
    for _ in range(2):
        assert uploads.assemble(tmp_path, "uploaded/a", {"model.gguf": DIGEST, "sub/copy": DIGEST}) == 2 * len(CONTENT)
    listed = RepositoryCache(tmp_path, "uploaded/a").listing("main")
    assert listed is not None
    assert {path: file.digest for path, file in listed.files.items()} == {"model.gguf": DIGEST, "sub/copy": DIGEST}
    with os.fdopen(RepositoryCache(tmp_path, "uploaded/a").open_blob(DIGEST), "rb") as file:
        assert file.read() == CONTENT


def test_upload_with_another_digest_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Malformed, match="SHA-256"):
        uploads.store(tmp_path, DIGEST, [b"other"])
    assert uploads.find(tmp_path, DIGEST) is None
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_no_path_leads_out_of_the_repository_and_no_file_is_missing(tmp_path: Path) -> None:
    uploads.store(tmp_path, DIGEST, [CONTENT])
    with pytest.raises(ValueError, match="path"):
        uploads.assemble(tmp_path, "uploaded/a", {"../x": DIGEST})
    with pytest.raises(FilesMissing):
        uploads.assemble(tmp_path, "uploaded/a", {"x": "0" * 64})


def test_old_uploads_are_deleted_and_their_models_stay(tmp_path: Path) -> None:
    uploads.store(tmp_path, DIGEST, [CONTENT])
    os.utime(tmp_path / ".uploads" / DIGEST, (0, 0))
    other = hashlib.sha256(b"").hexdigest()
    uploads.store(tmp_path, other, [])
    assert uploads.find(tmp_path, DIGEST) is None
    uploads.assemble(tmp_path, "uploaded/a", {"model.gguf": other})
    uploads.drop(tmp_path, [other])
    assert uploads.find(tmp_path, other) is not None
    assert RepositoryCache(tmp_path, "uploaded/a").listing("main") is not None
