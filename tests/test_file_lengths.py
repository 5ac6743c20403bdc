"""A file is short enough to be read in one sitting."""

from __future__ import annotations

from pathlib import Path

from .own_files import python_files

ROOT = Path(__file__).parents[1]
MAX_LINES = 600


def long_files(root: Path) -> set[str]:
    """The Python files that have more than `MAX_LINES` lines, relative to `root`."""
    paths = [path for folder in ("src", "tests", "bench") for path in python_files(root / folder)]
    return {str(path.relative_to(root)) for path in paths if path.read_bytes().count(b"\n") > MAX_LINES}


def test_no_file_is_too_long() -> None:
    assert not long_files(ROOT), "divide them by what they are about"


def test_detects_a_file_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests" / ".venv").mkdir(parents=True)
    (tmp_path / "tests" / ".venv" / "library.py").write_text("pass\n" * (MAX_LINES + 1))
    (tmp_path / "src" / "short.py").write_text("pass\n" * MAX_LINES)
    (tmp_path / "src" / "long.py").write_text("pass\n" * (MAX_LINES + 1))
    assert long_files(tmp_path) == {"src/long.py"}
