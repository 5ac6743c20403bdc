"""Files of tokenizers that the library does not read, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.tokenizer import library
from cortex.neuron.text.tokenizer.library import LibraryTokenizer

DAMAGED = [
    b"",
    b"\xff",
    b"[" * 100_000,
    b"null",
    b'{"version": "1.0"}',
    b'{"version": "1.0", "model": {"type": "Unigram", "unk_id": 5, "vocab": []}}',
    b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_file_is_rejected_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TextFileMalformed, match=r"tokenizer\.json is not a tokenizer"):
        LibraryTokenizer.load(tmp_path)


def test_file_that_cannot_be_read_is_not_reported_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(TextFileMalformed, match=r"tokenizer\.json cannot be read \(Is a directory\)"):
        LibraryTokenizer.load(tmp_path)


@pytest.mark.parametrize("problem", [MemoryError, RuntimeError])
def test_other_errors_are_not_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: type[Exception]
) -> None:
    class Failing:
        @staticmethod
        def fail(*_: Any) -> None:
            raise problem

        from_buffer = from_file = fail

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(library, "Backend", Failing)
    with pytest.raises(problem):
        LibraryTokenizer.load(tmp_path)
