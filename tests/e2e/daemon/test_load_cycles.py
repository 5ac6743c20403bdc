"""Models that take turns give everything back; the script runs as long as one likes, here a short while."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]


def test_memory_is_the_same_after_two_models_took_turns(wide_model: Path, tiny_model: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(ROOT / "bench/load_cycles.py"), "--cycles", "8", str(wide_model), str(tiny_model)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
