"""The benchmark of loads, on a model so small that it takes seconds: it writes its files and prints its results."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from cortex.neuron.engine.memory.device import compute_dtype
from cortex.neuron.kernels.cpu.forms import best_form

ROOT = Path(__file__).parents[3]
STAGES = ["open s", "read s", "pages s", "warm s", "token s", "total s"]


def test_files_as_stored_and_quantised_at_load_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_quant = best_form(compute_dtype("auto", torch.device("cpu"))) is not None
    dense = "q4" if has_quant else "bf16"
    options = ["--shape", "tiny", "--device", "cpu", "--runs", "1", "--only", "gguf"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(sys, "argv", ["loads.py", *options, "--json", str(tmp_path / "report.json")])
    loads = import_module("loads")
    assert loads.main() == 0
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert list(results) == ["gguf"]
    path = loads.written([dense], "tiny", tmp_path)[dense]
    monkeypatch.setattr(sys, "argv", ["loads.py", "--device", "cpu", "--only", dense, "--alone", str(path)])
    capsys.readouterr()
    assert loads.main() == 0  # what the process of a variant runs, in this one
    results[dense] = json.loads(capsys.readouterr().out)
    for figures in results.values():
        assert figures["total s"] == pytest.approx(sum(figures[stage] for stage in STAGES[:-1]))
        assert figures["GB"] > 0
