"""The benchmark of a whole neuron, on a model so small that it takes seconds: it runs and prints its results."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ...programs import PYTHONPATH

pytestmark = pytest.mark.e2e

BENCH = Path(__file__).parents[3] / "bench"
SCENARIOS = ["start", "load", "wake", "swap", "decode-1", "prefill-64", "cached-64", "requests-2"]


def test_every_scenario_is_measured_from_files_it_wrote_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in this process, which has imported torch already."""
    model, report = tmp_path / "model", tmp_path / "report.json"
    options = ["--shape", "tiny", "--folder", str(model), "--json", str(report), "--settle-s", "0"]
    monkeypatch.setattr(sys, "argv", ["neuron.py", *options, "--scenarios", ",".join(SCENARIOS)])
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("NEURON_LIMITS__SLEEP_MB", "64")  # on a CPU nothing sleeps without it
    assert import_module("neuron").main() == 0
    results = json.loads(report.read_text())["results"]
    assert list(results) == SCENARIOS
    assert all(figure > 0 for figures in results.values() for figure in figures.values()), results
    assert (model / "tokenizer.json").exists()
