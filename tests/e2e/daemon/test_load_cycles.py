"""Models that take turns give everything back; the script runs as long as one likes, here a short while."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]


def test_two_models_that_take_turns_leave_the_memory_where_it_was(wide_model: Path, tiny_model: Path) -> None:
    told = subprocess.run(
        [sys.executable, str(ROOT / "bench/load_cycles.py"), "--cycles", "8", str(wide_model), str(tiny_model)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
