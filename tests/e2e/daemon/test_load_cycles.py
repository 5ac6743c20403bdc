"""Models that take turns give everything back; the script runs as long as one likes, here a short while."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from .conftest import SOURCE

pytestmark = pytest.mark.e2e

BENCH = Path(__file__).parents[3] / "bench"


def test_memory_is_the_same_after_two_models_took_turns(
    wide_model: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["load_cycles.py", "--cycles", "8", str(wide_model), str(tiny_model)])
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    assert import_module("load_cycles").main() == 0
