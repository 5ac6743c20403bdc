"""Models that take turns give everything back; the script runs as long as one likes, here a short while."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..conftest import Daemon

pytestmark = pytest.mark.e2e

BENCH = Path(__file__).parents[4] / "bench"


def test_memory_is_the_same_after_two_models_took_turns(
    daemon: Daemon, wide_model: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["load_cycles.py", "--cycles", "8", str(wide_model), str(tiny_model)])
    monkeypatch.syspath_prepend(str(BENCH))
    load_cycles = import_module("load_cycles")
    node = import_module("daemon").Neuron(daemon.url)
    monkeypatch.setattr(load_cycles, "running_neuron", lambda: nullcontext((node, daemon.process.pid)))
    assert load_cycles.main() == 0
