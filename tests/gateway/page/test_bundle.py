"""The files of the page: small, complete, unchanged since they were fetched, and without inline code."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from pathlib import Path

from cortex.gateway.page.page import read_bundle

FILES = Path(__file__).parents[3] / "src/cortex/gateway/page/files"
MAX_COMPRESSED_BYTES = 200 * 1024


def test_vendored_libraries_have_the_recorded_checksums_and_licences() -> None:
    recorded = json.loads((FILES / "vendor/vendor.json").read_text())
    licences = (FILES / "vendor/LICENSES.txt").read_text()
    names = set()
    for library in recorded:
        assert library["licence"]
        assert f"{library['package']} {library['version']}" in licences
        for name, digest in library["sha256"].items():
            assert hashlib.sha256((FILES / "vendor" / name).read_bytes()).hexdigest() == digest, name
            names.add(name)
    found = {path.relative_to(FILES / "vendor").as_posix() for path in (FILES / "vendor").rglob("*") if path.is_file()}
    assert found - names == {"vendor.json", "LICENSES.txt"}


def test_page_is_at_most_200_kb_compressed() -> None:
    shown = {name: file for name, file in read_bundle().items() if not name.endswith((".txt", ".json"))}
    assert sum(len(file.compressed) for file in shown.values()) <= MAX_COMPRESSED_BYTES


def test_every_reference_is_relative_and_exists() -> None:
    bundle = read_bundle()
    index = bundle["index.html"].plain.decode()
    for path in re.findall(r'(?:src|href)="([^"]+)"', index):
        assert path.removeprefix("page/") in bundle, path
    for name, file in bundle.items():
        if not name.startswith("js/"):
            continue
        for path in re.findall(r'(?:from|import)\s*\(?"([^"]+)"', file.plain.decode()):
            assert path.startswith("."), f"{name} imports {path}"
            assert posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) in bundle, f"{name} imports {path}"


def test_page_has_no_inline_script_or_style() -> None:
    index = (FILES / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", index)
