"""Revisions in the hub's cache, which clients and other nodes name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cortex.neuron.weights.hub.cache import RepositoryCache

COMMIT = "a" * 40


@pytest.mark.parametrize("revision", ["main", "refs/pr/3", "v1.0"])
def test_remembers_the_commit_of_a_revision(tmp_path: Path, revision: str) -> None:
    cache = RepositoryCache(tmp_path, "o/n")
    assert cache.commit_of(revision) is None
    cache.remember(revision, COMMIT)
    assert cache.commit_of(revision) == COMMIT


@pytest.mark.parametrize("prefix", ["../", "../../../outside/../", "x/../../", "./../", "/"])
def test_no_revision_names_a_file_elsewhere(tmp_path: Path, prefix: str) -> None:
    cache = RepositoryCache(tmp_path / "cache", "o/n")
    cache.remember("main", COMMIT)
    elsewhere = cache.root / "secret"
    elsewhere.write_text(COMMIT)
    revision = str(elsewhere) if prefix == "/" else prefix + os.path.relpath(elsewhere, cache.root)
    assert cache.commit_of(revision) is None
    cache.remember(f"{prefix}written" if prefix != "/" else str(tmp_path / "written"), "b" * 40)
    assert not [path for path in tmp_path.rglob("written") if "refs" not in path.parts]


def test_a_revision_that_is_no_path_has_no_commit(tmp_path: Path) -> None:
    for revision in ("a\0b", "", "x" * 5000, "\ud800"):
        assert RepositoryCache(tmp_path, "o/n").commit_of(revision) is None
