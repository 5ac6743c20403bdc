"""The benchmark of a whole neuron, on a model so small that it takes seconds: it runs and prints its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
SCENARIOS = ["start", "load", "wake", "swap", "decode-1", "prefill-64", "cached-64", "requests-2"]


def test_every_scenario_is_measured_from_files_it_wrote_itself(tmp_path: Path) -> None:
    options = [
        "--shape",
        "tiny",
        "--folder",
        str(tmp_path / "model"),
        "--json",
        str(tmp_path / "report.json"),
        "--settle-s",
        "0",
    ]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "bench/neuron.py"), *options, "--scenarios", ",".join(SCENARIOS)],
        # On a CPU nothing sleeps unless `sleep_mb` is set.
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NEURON_LIMITS__SLEEP_MB": "64"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert list(results) == SCENARIOS
    assert all(figure > 0 for figures in results.values() for figure in figures.values()), results
    assert (tmp_path / "model" / "tokenizer.json").exists()
