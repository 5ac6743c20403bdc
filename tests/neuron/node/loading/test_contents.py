"""Digests of whole models, read in the background."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cortex.neuron.node.loading.contents import Contents
from cortex.neuron.weights.hub.file_digests import FileDigests


@dataclass
class _Inspection:
    metadata: Any
    stamps: tuple[tuple[str, int, int], ...]
    content: str = ""


async def test_files_that_could_not_be_read_are_read_again_after_they_have_changed(tmp_path: Path) -> None:
    file, digests = tmp_path / "tokenizer.json", FileDigests()
    file.write_bytes(b"1")
    metadata = SimpleNamespace(path=tmp_path, digest="sample")
    inspections = {"m": _Inspection(metadata, ((file.name, 1, 1),))}
    models = SimpleNamespace(was_loaded=lambda _: True, is_loading_any=bool)
    loader = SimpleNamespace(inspections=inspections)
    contents = Contents(digests, cast("Any", loader), cast("Any", models), lambda _: None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digests, "read", _failing)
        await contents.read()
    await contents.read()
    assert inspections["m"].content == "", "nothing has changed"
    file.write_bytes(b"23")
    inspections["m"] = _Inspection(metadata, ((file.name, 2, 2),))
    await contents.read()
    assert inspections["m"].content


def _failing(*_: object, **__: object) -> str:
    raise OSError("changes")
